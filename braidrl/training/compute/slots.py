"""The cache of rows in decoding: each row has a slot, and all slots step together.

    keys, values    (slots, K, capacity, D)      of each attention layer; a slot is filled from position 0
    states          (slots, ...)                 of each mixer (convolutions, recurrences); independent of the row's
                    length

`SlotStep` is the context of one step: each slot's new key and value are written at its position, and its query sees all
positions up to it. Positions are read up to the longest row, rounded up. Layers are numbered in call order and sized by
the first tensors that they receive.

Shapes: B slots in the step, H query heads, K key/value heads, D head width (of values: E), L positions read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from braidrl.training.compute.attention import (
    AttentionContext,
    Forward,
    PackedSequences,
    Scores,
    additive,
    attend_plainly,
    parameters_of,
)

READ_MULTIPLE = 32
"""Reads are rounded up to a multiple of this many positions, so that few shapes occur."""
CACHE_NAMES = ("past_key_values", "cache", "cache_params", "past_key_value", "past_states")
"""The parameter names of transformers' cache in mixers."""


@dataclass
class Prefix:
    """The cache of one prompt: keys and values (K, P, D) of each attention layer, and states (...) of each mixer."""

    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)


class SlotCache:
    """Keys, values and states of `slots` rows; grows to the longest reserved row."""

    def __init__(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.dtype, self.device, self.capacity = slots, dtype, device, 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each attention layer."""
        self.states: list[dict[str, Tensor]] = []
        """States of each mixer by name, (slots, ...) each."""

    def layer(self, number: int, heads: int, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return keys and values of an attention layer, allocated on first use."""
        while len(self.layers) <= number:
            sizes = [(self.slots, heads, self.capacity, width) for width in widths]
            keys, values = (torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes)
            self.layers.append((keys, values))
        return self.layers[number]

    def reserve(self, positions: int) -> None:
        """Grow to at least `positions` positions per slot, keeping the contents."""
        if positions <= self.capacity:
            return
        before, self.capacity = self.capacity, round_up(positions, READ_MULTIPLE)
        for number, layer in enumerate(self.layers):
            keys, values = (s.new_zeros((*s.shape[:2], self.capacity, s.shape[3])) for s in layer)
            for target, source in zip((keys, values), layer, strict=True):
                target[:, :, :before] = source
            self.layers[number] = keys, values

    def release(self) -> None:
        self.capacity = 0
        self.layers.clear()
        self.states.clear()

    def fill(self, slots: Tensor, prefix: Prefix | None) -> None:
        """Copy one prompt's prefix to the start of each of `slots` (S,); a prompt of one token has no prefix."""
        if prefix is None:
            for kept in self.states:
                for state in kept.values():
                    state[slots] = 0
            return
        for number, (keys, values) in enumerate(prefix.keys_values):
            layer = self.layer(number, len(keys), (keys.shape[-1], values.shape[-1]))
            for store, states in zip(layer, (keys, values), strict=True):
                copies = states.expand(len(slots), *states.shape)
                store[:, :, : states.shape[1]].index_copy_(0, slots, copies)  # on a CPU faster than an assignment
        for number, states_of_mixer in enumerate(prefix.states):
            stored = self.mixer(number, states_of_mixer)
            for name, value in states_of_mixer.items():
                stored[name][slots] = value

    def mixer(self, number: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a mixer's states, allocated on first use; `states` (...) are those of one row."""
        while len(self.states) <= number:
            self.states.append({name: s.new_zeros((self.slots, *s.shape)) for name, s in states.items()})
        return self.states[number]

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of one slot, and its states, into another."""
        for layer in self.layers:
            for store in layer:
                store[target, :, :positions] = store[source, :, :positions]
        for states in self.states:
            for state in states.values():
                state[target] = state[source]

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors that a step reads and writes."""
        for layer in self.layers:
            yield from layer
        for states in self.states:
            yield from states.values()


class SlotStep(AttentionContext):
    """The context of one decode step of the first B slots at `positions` (B,), at most `longest - 1`."""

    def __init__(self, cache: SlotCache, positions: Tensor, longest: int) -> None:
        self._cache = cache
        self._positions = positions
        self._read = min(round_up(longest, READ_MULTIPLE), cache.capacity)
        self._written: dict[int, Tensor] = {}
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        self._attended = self._mixed = 0

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (B, H, 1, D) to keys (B, K, 1, D) and values (B, K, 1, E); returns (B, 1, H, E)."""
        (batch, heads, _, width), groups, device = query.shape, key.shape[1], query.device
        stored = self._cache.layer(self._attended, groups, (key.shape[-1], value.shape[-1]))
        self._attended += 1
        if groups not in self._written:
            # The flat index of each slot's next key in a store of this many heads, (B * K,).
            rows = torch.arange(batch * groups, device=device).view(-1, groups)
            self._written[groups] = (rows * self._cache.capacity + self._positions[:, None]).flatten()
        for store, states in zip(stored, (key, value), strict=True):
            store.view(-1, store.shape[-1]).index_copy_(0, self._written[groups], states.reshape(-1, store.shape[-1]))
        if (rule := (scores.window, scores.chunk)) not in self._masks:
            visible = scores.visible(self._positions[:, None], torch.arange(self._read, device=device))
            self._masks[rule] = additive(visible, query.dtype)[:, None, None]  # (B, 1, 1, L)
        keys, values = (store[:batch, :, : self._read] for store in stored)
        # query heads that share a key head form a batch of queries to it, so that each key is read once
        grouped = query.reshape(batch, groups, -1, width)
        plain = scores.softcap is None and scores.sinks is None
        if plain and (query.is_cuda or query.dtype in (torch.bfloat16, torch.float16)):
            output = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=self._masks[rule], scale=scores.scaling
            )
        else:
            # on a CPU, two plain matrix products beat the blocked kernel for few queries per head
            sinks = scores.sinks
            sinks = None if sinks is None else sinks.view(1, groups, -1, 1).expand(batch, -1, -1, 1)
            output = attend_plainly(grouped, keys, values, scores, self._masks[rule], sinks)
        return output.reshape(batch, 1, heads, -1)

    def mix(self, module: nn.Module, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a mixer for one token of each slot, from the slots' states, which it updates."""
        number, batch = self._mixed, len(self._positions)
        self._mixed += 1
        has_states = number < len(self._cache.states)
        states = {name: state[:batch] for name, state in self._cache.states[number].items()} if has_states else {}
        carried = MixerCache(states)
        output = forward(*arguments, **{**named, cache_name(module): carried})
        for name, value in carried.states().items():
            if not has_states:
                states[name] = self._cache.mixer(number, {n: v[0] for n, v in carried.states().items()})[name][:batch]
            if states[name].data_ptr() != value.data_ptr():
                states[name].copy_(value)
        return output


@dataclass(eq=False)
class PrefillSequences(AttentionContext):
    """The context of packed prompts that records their prefixes."""

    sequences: PackedSequences
    _keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    _states: list[dict[int, dict[str, Tensor]]] = field(default_factory=list, init=False)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend as PackedSequences does, recording the layer's keys and values."""
        self._keys_values.append((key[0], value[0]))
        return self.sequences.attend(module, query, key, value, scores)

    def mix(self, module: nn.Module, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a mixer as PackedSequences does, recording the state after each sequence."""
        name = cache_name(module)
        caches: dict[int, tuple[MixerCache, int]] = {}
        named = {key: value for key, value in named.items() if key != name}

        def with_cache(numbers: list[int]) -> dict[str, Any]:
            carried = MixerCache()
            caches.update({number: (carried, row) for row, number in enumerate(numbers)})
            return {name: carried}

        output = self.sequences.mix(module, forward, arguments, named, with_cache, multiple=1)
        self._states.append(
            {
                number: {name: state[row].clone() for name, state in carried.states().items()}
                for number, (carried, row) in caches.items()
            }
        )
        return output

    def row_lengths(self, positions: Tensor) -> Tensor:
        """Return lengths with each prompt's last token, which the first decode step computes."""
        return self.sequences.row_lengths(positions) + 1

    def prefixes(self, count: int) -> list[Prefix]:
        lengths = list(self.sequences.lengths)
        parts = [(keys.split(lengths, 1), values.split(lengths, 1)) for keys, values in self._keys_values]
        return [
            Prefix([(keys[n], values[n]) for keys, values in parts], [states[n] for states in self._states])
            for n in range(count)
        ]


class MixerCache(Cache):
    """A transformers cache with the states of one mixer, valid for any layer number."""

    def __init__(self, states: Mapping[str, Tensor] | None = None) -> None:
        """Start empty, or continue `states`, which are updated in place."""
        self.layer = LinearAttentionLayer()
        super().__init__(layers=[self.layer] * 1000)  # under each layer number of a config.json
        self._linear: Tensor | None = None
        for name, state in (states or {}).items():
            if name == "linear":
                self._linear = state
            elif name == "recurrent":
                self.layer.recurrent_states[0], self.layer.is_recurrent_states_initialized[0] = state, True
            else:
                self.layer.conv_states[0], self.layer.is_conv_states_initialized[0] = state, True
                self.layer.conv_kernel_size[0] = state.shape[-1]
            self.layer.has_previous_state[0] = True

    def states(self) -> dict[str, Tensor]:
        layer = self.layer
        by_name = {"convolution": layer.conv_states[0], "recurrent": layer.recurrent_states[0], "linear": self._linear}
        return {name: state for name, state in by_name.items() if state is not None}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_linear_cache(self, _: int) -> Tensor | None:
        """Return the state of MiniMax' lightning attention, which has a separate cache interface."""
        return self._linear

    def set_linear_cache(self, _: int, state: Tensor) -> None:
        self._linear = state


def cache_name(module: Any) -> str:
    """Return the parameter name of a mixer's or decoder's cache. Raises ValueError if it has none."""
    kind: Any = type(module)
    names = parameters_of(getattr(kind, "plain_forward", kind.forward))
    name = next((n for n in CACHE_NAMES if n in names), None)
    if name is None:
        raise ValueError(f"{kind.__name__} takes no cache, so the embedded engine cannot decode with it")
    return name


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

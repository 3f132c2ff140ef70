"""Keys and values of the rows that are being decoded: each row has a slot, and all slots take one step together.

    store   (2, layers, slots, K, capacity, D)      keys and values; a slot is filled from position 0 on

`SlotStep` is the attention context of one step: each slot's new key and value are written at its position, and its query
sees what is there so far. Only as many positions are read as the longest row has, rounded up.

Shapes: B slots in the step, H query heads, K key/value heads, D head width, L positions read.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from braidrl.training.compute.attention import PackedSequences

READ_MULTIPLE = 32
"""Positions read are a multiple of this, so that few shapes occur."""


class SlotCache:
    """Keys and values of `slots` rows; grows to the longest row that is asked for."""

    def __init__(self, config: Any, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, layers, slots, config.num_key_value_heads, 0, width)
        self.store = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.store.shape[4]

    def reserve(self, positions: int) -> None:
        """Grow to at least so many positions per slot, keeping the contents."""
        if positions <= self.capacity:
            return
        layers, slots, heads, width = (self.store.shape[i] for i in (1, 2, 3, 5))
        grown = self.store.new_zeros((2, layers, slots, heads, round_up(positions, READ_MULTIPLE), width))
        grown[:, :, :, :, : self.capacity] = self.store
        self.store = grown

    def release(self) -> None:
        """Free the memory and the contents."""
        self.store = self.store.new_zeros((*self.store.shape[:4], 0, self.store.shape[5]))

    def fill(self, slots: Tensor, prefix: Tensor) -> None:
        """Copy one prompt's keys and values (2, layers, K, P, D) to the beginning of each of `slots` (S,)."""
        self.store[:, :, slots, :, : prefix.shape[3]] = prefix[:, :, None]

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of one slot into another."""
        self.store[:, :, target, :, :positions] = self.store[:, :, source, :, :positions]


class SlotStep:
    """Attention of one decode step of the first B slots, at `positions` (B,), of which the greatest is `longest - 1`."""

    def __init__(self, cache: SlotCache, positions: Tensor, longest: int) -> None:
        self._cache = cache
        self._positions = positions
        self._read = min(round_up(longest, READ_MULTIPLE), cache.capacity)
        heads = cache.store.shape[3]
        rows = torch.arange(len(positions) * heads, device=positions.device).view(-1, heads)
        self._written = (rows * cache.capacity + positions[:, None]).flatten()
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend with queries (B, H, 1, D) to keys and values (B, K, 1, D); returns (B, 1, H, D)."""
        layer, (batch, heads, _, width) = int(module.layer_idx), query.shape  # type: ignore[arg-type]
        stored = self._cache.store[:, layer, :batch]
        for store, states in zip(stored, (key, value), strict=True):
            store.view(-1, width).index_copy_(0, self._written, states.reshape(-1, width))
        keys, values = stored[:, :, :, : self._read]
        # query heads that share a key head are a batch of queries to it: each key is read once
        grouped = query.reshape(batch, keys.shape[1], -1, width)
        output = _attend(grouped, keys, values, self._mask(window, query.dtype), scaling)
        return output.reshape(batch, 1, heads, width)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 where a slot has a key to see and -inf elsewhere, (B, 1, 1, L)."""
        if window not in self._masks:
            places = torch.arange(self._read, device=self._positions.device)
            hidden = places > self._positions[:, None]
            if window is not None:
                hidden |= places <= self._positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attend with (B, K, H/K, D) queries to (B, K, L, D) keys and values."""
    if query.is_cuda or query.dtype in (torch.bfloat16, torch.float16):
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    # for few queries per head two plain matrix products beat the blocked kernel on a CPU
    scores = torch.matmul(query * scaling, keys.transpose(-1, -2)).add_(mask)
    return torch.matmul(scores.softmax(-1), values)


class PrefillSequences:
    """Attention of packed prompts that keeps their keys and values, (2, layers, K, N, D)."""

    def __init__(self, sequences: PackedSequences, cache: SlotCache) -> None:
        _, layers, _, heads, _, width = cache.store.shape
        self.kept = cache.store.new_empty((2, layers, heads, sum(sequences.lengths), width))
        self._sequences = sequences

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend as PackedSequences does, keeping each layer's keys and values."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.kept[0, layer], self.kept[1, layer] = key[0], value[0]
        return self._sequences.attend(module, query, key, value, scaling, window)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

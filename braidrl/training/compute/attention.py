"""The attention of every model that Braid loads: which key each query sees is a value that is passed to the model's forward.

    model.model(input_ids=..., position_ids=..., use_cache=False, sequences=context)
                                                                       |
    each attention layer:  queries, keys, values ---> context.attend(...)

`PackedSequences` is the context of training, inference and prefill: sequences packed into one row without padding, each attending to
itself alone. The rollout engine has a context of its own for decoding from slots.

Shapes: N tokens packed, S sequences of one length, L that length, H query heads, K key/value heads, D head width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from braidrl.native.short_attention import attend_short, kernel_fits

ATTENTION = "braid"
COMPILED = "compiled_attention"
"""Attribute of attention modules that may use the compiled kernel."""
SHORT = 256
"""Longest sequence (tokens) whose attention scores are kept for the backward pass on a CPU without the compiled kernel."""


class AttentionContext(Protocol):
    """Decides which keys each query sees."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend with queries (1, H, N, D) to keys and values (1, K, N, D), at most `window` tokens back; returns (1, N, H, D)."""


def braid_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    sequences: AttentionContext | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention for transformers, in each layer. Raises ValueError without `sequences`, and for anything but softmax attention."""
    if sequences is None:
        raise ValueError(
            f"a model with {ATTENTION!r} attention is called with sequences=, as in PackedSequences.of([n])"
        )
    if attention_mask is not None or softcap is not None or s_aux is not None or dropout != 0.0:
        raise ValueError(f"{type(module).__name__}: masks, dropout, soft caps and attention sinks are not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return sequences.attend(module, query, key, value, scaling, sliding_window), None


AttentionInterface.register(ATTENTION, braid_attention)


# torch 2.11 takes fewer heads of keys than of queries as they are; later versions want a flag.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Causal attention within each of the sequences of `lengths`, packed one after the other.

    `offsets` (S + 1,) int32, on the model's device, says where each begins and the last one ends. `keep_scores` is for training: see
    `attend_equal`.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    keep_scores: bool = False

    @staticmethod
    def of(lengths: Iterable[int], device: torch.device | str = "cpu", keep_scores: bool = False) -> "PackedSequences":
        """Make the context of sequences of these lengths; empty ones are left out."""
        kept = tuple(int(length) for length in lengths if length)
        offsets = torch.tensor([0, *accumulate(kept)], dtype=torch.int32, device=device)
        return PackedSequences(kept, offsets, keep_scores)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend within each sequence. Raises ValueError when the packed row is not as long as the sequences together."""
        if query.shape[0] != 1 or query.shape[2] != sum(self.lengths):
            raise ValueError(f"sequences of {sum(self.lengths)} tokens, but the input is {tuple(query.shape)}")
        states = _packed(query), _packed(key), _packed(value)
        # torch has a variable-length kernel for half precision on CUDA
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._variable_length(*states, scaling, window)[None]
        if getattr(module, COMPILED, False) and self.lengths and kernel_fits(max(self.lengths), *states):
            return attend_short(*states, self.offsets, max(self.lengths), scaling, window)[None]
        return self._by_equal_lengths(*states, scaling, window)[None]

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        longest = max(self.lengths)
        back = -1 if window is None else window - 1
        output = varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), self.offsets, self.offsets, longest, longest,
            scale=scaling, window_size=(back, 0), **(GROUPED if query.shape[1] != key.shape[1] else {}),
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output

    def _by_equal_lengths(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend once per length, over the batch of sequences of that length. (N, heads, D) to (N, H, D)."""
        buckets = [(len(numbers), length) for length, numbers in self._by_length.items()]
        sizes = [count * length for count, length in buckets]
        # split, not slices: the backward of a split is one concatenation, that of a slice is N zeros each
        states = (self._gathered(flat).split(sizes) for flat in (query, key, value))
        outputs = []
        for shape, parts in zip(buckets, zip(*states, strict=True), strict=True):
            q, k, v = (part.unflatten(0, shape) for part in parts)
            outputs.append(attend_equal(q, k, v, scaling, window, self.keep_scores))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._permutation is None else _Permuted.apply(joined, *reversed(self._permutation))

    @cached_property
    def _by_length(self) -> dict[int, list[int]]:
        """Return the sequences' numbers by their length, lengths in the order in which they first occur."""
        numbers: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            numbers.setdefault(length, []).append(number)
        return numbers

    @cached_property
    def _permutation(self) -> tuple[Tensor, Tensor] | None:
        """Return where each token comes from when equal lengths lie together, and the inverse; None where they already do."""
        order = [number for numbers in self._by_length.values() for number in numbers]
        if order == sorted(order):
            return None
        tokens = torch.arange(sum(self.lengths)).split(list(self.lengths))
        forward = torch.cat([tokens[number] for number in order])
        return forward.to(self.offsets.device), forward.argsort().to(self.offsets.device)

    def _gathered(self, flat: Tensor) -> Tensor:
        return flat if self._permutation is None else _Permuted.apply(flat, *self._permutation)

    def position_ids(self) -> Tensor:
        """Return the position of each packed token in its own sequence, (1, N) int64, on the device of `offsets`."""
        return position_ids_of(self.lengths, self.offsets.device)


def position_ids_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return positions 0, 1, ... counted anew in each sequence of `lengths`, (1, N) int64."""
    if not len(lengths):
        return torch.empty((1, 0), dtype=torch.int64, device=device)
    return torch.cat([torch.arange(length) for length in lengths]).to(device)[None]


class _Permuted(torch.autograd.Function):
    """Rows in another order. Its backward is the inverse gather; that of index_select would add into zeros row by row."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, forward: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return flat.index_select(0, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def _packed(states: Tensor) -> Tensor:
    """(1, heads, N, D) to (N, heads, D)."""
    return states[0].transpose(0, 1)


def attend_equal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, keep_scores: bool = False
) -> Tensor:
    """Attend within S sequences of L tokens, (S, L, heads, D) each; returns (S * L, H, D).

    `keep_scores` lets a CPU keep the scores of short sequences for the backward pass: faster, but not bitwise equal for every S.
    """
    length = query.shape[1]
    mask = None
    if window is not None and window < length:
        positions = torch.arange(length, device=query.device)
        back = positions[:, None] - positions[None, :]
        mask = (back >= 0) & (back < window)
    if keep_scores and query.device.type == "cpu" and length <= SHORT:
        return _attend_plainly(query, key, value, scaling, mask)
    output = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[2] != key.shape[2],
    )  # fmt: skip
    return output.transpose(1, 2).flatten(0, 1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """Compute `attend_equal` by two matrix products in at least float32: the blocked kernel's backward is slow on short sequences."""
    sequences, length, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    # query heads that share a key head are more queries to it
    queries = query.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).to(dtype)
    keys, values = (states.transpose(1, 2).to(dtype) for states in (key, value))
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    hidden = torch.zeros(length, length, dtype=dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    scores = torch.matmul(queries * scaling, keys.transpose(-1, -2)) + hidden.repeat(heads // key.shape[2], 1)
    output = torch.matmul(scores.softmax(-1), values).unflatten(2, (-1, length))
    return output.permute(0, 3, 1, 2, 4).reshape(sequences * length, heads, -1).to(query.dtype)

"""The attention of every model that Braid loads: an attention context, passed outside the forward arguments, decides
which keys a query sees.

    with attending(context): model.model(input_ids=..., position_ids=..., use_cache=False)
                                 |
    each attention layer:  queries, keys, values ---> context.attend(...)
    each other mixer:      hidden states -----------> context.mix(...)

`PackedSequences` is the context of training, inference and prefill: sequences packed into one row without padding, each
attending only to itself. The embedded engine decodes from slots with another context. A mixer is a module that mixes
tokens outside the attention interface: linear attention, convolutions, state-space layers.

Shapes: N tokens packed, S sequences of equal length L, H query heads, K key/value heads, D head width (of values: E).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AttentionInterface

from braidrl.data.packing import rows_by_group
from braidrl.native.kernels import attend_short

ATTENTION = "braid"
COMPILED = "compiled_attention"
"""Attribute that marks attention modules which may use the compiled kernel."""
SHORT = 256
"""Longest sequence (tokens) whose attention scores are kept for the backward pass on a CPU without the compiled kernel.
"""
HEADS_RANK = "heads_rank"
"""Attribute of an attention layer whose heads are sharded: the rank whose heads it has, for parameters of all heads."""
UNKNOWN = {"position_bias", "head_mask", "indices", "block_tables"}
"""Arguments that change the scores and that Braid does not support."""
MULTIPLE = 64
"""Lengths up to a multiple of this are one batch in a mixer: linear attention computes chunks of 64 tokens anyway."""
# torch 2.11 supports fewer key heads than query heads by default; later versions need a flag.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Scores:
    """The rule from scores to weights: softmax(cap(scaling · q kᵀ)) over the visible keys and, if any, the sink."""

    scaling: float
    window: int | None = None
    """Number of last positions that a query sees, including the query's."""
    chunk: int | None = None
    """A query sees only the chunk of this many positions that contains it."""
    softcap: float | None = None
    """Scores s become c · tanh(s / c)."""
    sinks: Tensor | None = None
    """(H,): an extra score per head, which takes weight and contributes no value."""

    @property
    def plain(self) -> bool:
        """Return True if the rule is softmax alone, within a window at most: what fused kernels compute."""
        return self.chunk is None and self.softcap is None and self.sinks is None

    def visible(self, query: Tensor, key: Tensor, blocks: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return whether queries at positions (..., Q, 1) see keys at positions (..., 1, K): a bool mask.

        `blocks` are the image numbers of queries and keys, 0 for text: tokens of one image see each other in both
        directions.
        """
        visible = key <= query
        if blocks is not None:
            visible = visible | ((blocks[0] == blocks[1]) & (blocks[0] > 0))
        if self.window is not None:
            visible = visible & (query - key < self.window)
        return visible if self.chunk is None else visible & (query // self.chunk == key // self.chunk)


class AttentionContext(ABC):
    """An attention context: decides which keys each query sees."""

    @abstractmethod
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (1, H, N, D) to keys (1, K, N, D) and values (1, K, N, E); returns (1, N, H, E)."""

    def mix(self, module: nn.Module, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a mixer's own forward per sequence; argument tensors (1, N, ...) hold the tokens of all sequences."""
        return forward(*arguments, **named)

    def row_lengths(self, positions: Tensor) -> Tensor:
        """Return the length of each token's sequence, (B, N), for the positions (..., B, N) of the call."""
        return lengths_in_batch(positions)


running: ContextVar[AttentionContext | None] = ContextVar("running", default=None)
"""The context of the current forward pass."""


@contextmanager
def attending(context: AttentionContext | None) -> Iterator[None]:
    """Make attention layers and mixers use a context."""
    token = running.set(context)
    try:
        yield
    finally:
        running.reset(token)


def lengths_in_batch(positions: Tensor) -> Tensor:
    """Return the length of each token's row, (B, N), where positions (..., B, N) are those of B rows from the start."""
    longest = positions.amax(-1, keepdim=True).expand_as(positions) + 1
    return longest if longest.dim() == 2 else longest.flatten(0, -3).amax(0)


@cache
def parameters_of(forward: Forward) -> frozenset[str]:
    return frozenset(signature(forward).parameters)


def braid_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sequences: AttentionContext | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention for transformers.

    Raises ValueError without a context, and for unsupported arguments.
    """
    sequences = sequences or running.get()
    if sequences is None:
        raise ValueError(
            f"a model with {ATTENTION!r} attention is called with sequences=, as in PackedSequences.of([n])"
        )
    unknown = sorted(name for name in UNKNOWN & others.keys() if others[name] is not None)
    if attention_mask is not None or dropout != 0.0 or unknown:
        raise ValueError(
            f"{type(module).__name__}: {', '.join(unknown) or 'masks and dropout'} in attention are not supported"
        )
    # The layer's window or chunk from the configuration, as layers may not pass them.
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds, chunk = getattr(config, "layer_types", None) or (), None
    kind = kinds[number] if isinstance(number, int) and number < len(kinds) else None
    if kind == "chunked_attention":
        chunk = getattr(config, "attention_chunk_size", None)
    elif kind == "sliding_attention" and not sliding_window:
        sliding_window = getattr(config, "sliding_window", None)
    if s_aux is not None and len(s_aux) != query.shape[1]:
        s_aux = s_aux.unflatten(0, (-1, query.shape[1]))[getattr(module, HEADS_RANK)]
    scores = Scores(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or None, chunk, softcap, s_aux
    )
    # Contiguous as transformers' attention, for layers that take a view of it.
    return sequences.attend(module, query, key, value, scores).contiguous(), None


AttentionInterface.register(ATTENTION, braid_attention)


@dataclass(frozen=True, eq=False)
class PackedSequences(AttentionContext):
    """Causal attention within each of the consecutively packed sequences of `lengths`.

    `offsets` (S + 1,) int32, on the model's device, are the starts of the sequences and the end of the last.
    `keep_scores` is for training: see `attend_equal`. `blocks` (N,) are for models whose images see each other: the
    number of each token's image, 0 for text.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    keep_scores: bool = False
    blocks: Tensor | None = None
    _arranged: dict[int, "RowBatches"] = field(default_factory=dict, init=False)
    _masks: dict[tuple[int | None, int | None], list[Tensor | None]] = field(default_factory=dict, init=False)

    @staticmethod
    def of(
        lengths: Iterable[int],
        device: torch.device | str = "cpu",
        keep_scores: bool = False,
        blocks: Tensor | None = None,
    ) -> "PackedSequences":
        """Create the context of sequences of these lengths; empty ones are skipped."""
        nonempty = tuple(int(length) for length in lengths if length)
        offsets = torch.tensor([0, *accumulate(nonempty)], dtype=torch.int32, device=device)
        return PackedSequences(nonempty, offsets, keep_scores, blocks)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend within each sequence. Raises ValueError if the packed row's length is not that of all sequences."""
        if query.shape[0] != 1 or query.shape[2] != sum(self.lengths):
            raise ValueError(f"sequences of {sum(self.lengths)} tokens, but the input is {tuple(query.shape)}")
        longest, out = max(self.lengths, default=0), value.shape[-1]
        # (1, heads, N, D) to (N, heads, D)
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        plain = scores.plain and self.blocks is None
        if plain and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            back, wide = -1 if scores.window is None else scores.window - 1, max(query.shape[-1], out)
            query, key, value = (pad(s, (0, wide - s.shape[-1])).contiguous() for s in (query, key, value))
            output = varlen_attn(
                query,
                key,
                value,
                self.offsets,
                self.offsets,
                longest,
                longest,
                scale=scores.scaling,
                window_size=(back, 0),
                **(GROUPED if query.shape[1] != key.shape[1] else {}),
            )
            assert isinstance(output, Tensor)
            return output[None, ..., :out]
        if self.blocks is None and longest:
            compiled = attend_compiled(module, query, key, value, scores, self.offsets, longest)
            if compiled is not None:
                return compiled[None]
        # Once per length, over the batch of sequences of that length.
        batches = self.in_batches(1)
        states = zip(*(batches.split(flat) for flat in (query, key, value)), self.masks(scores), strict=True)
        return batches.join([attend_equal(q, k, v, scores, self.keep_scores, mask) for q, k, v, mask in states])[None]

    def masks(self, scores: Scores) -> list[Tensor | None]:
        """Return the mask (S, 1, L, L) of each batch of sequences with images that see each other; None for others."""
        batches = self.in_batches(1)
        if self.blocks is None:
            return [None] * len(batches.shapes)
        rule = scores.window, scores.chunk
        if rule not in self._masks:
            self._masks[rule] = []
            for blocks in batches.split(self.blocks):
                positions = torch.arange(blocks.shape[1], device=blocks.device)
                numbers = blocks[:, None, :, None], blocks[:, None, None, :]
                mask = scores.visible(positions[:, None], positions[None, :], numbers) if bool(blocks.any()) else None
                self._masks[rule].append(mask)
        return self._masks[rule]

    def mix(
        self,
        module: nn.Module,
        forward: Forward,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        more: Callable[[list[int]], dict[str, Any]] | None = None,
        multiple: int = MULTIPLE,
    ) -> Any:
        """Run a mixer over batches of sequences of about equal length, padded at the end, where padding does not change
        earlier tokens.

        Tensors (1, N, ...) among its arguments hold the tokens of all sequences. `more` returns further named arguments
        for the sequences of a batch, from their numbers. Sequences whose lengths round up to the same multiple of
        `multiple` are one batch.
        """
        total, batches, columns = sum(self.lengths), self.in_batches(multiple), list[list[Any]]()
        leaves, form = tree_flatten((arguments, named))
        for leaf in leaves:
            dimension = token_dimension(leaf, total)
            if dimension is None:
                columns.append([leaf] * len(batches.shapes))
                continue
            parts = batches.split(leaf.squeeze(dimension - 1).movedim(dimension - 1, 0))
            columns.append([part.movedim((0, 1), (dimension - 1, dimension)) for part in parts])
        results = []
        for shape, numbers, *part in zip(batches.shapes, batches.numbers, *columns, strict=True):
            batch_arguments, kwargs = tree_unflatten(part, form)
            with attending(EqualRows(shape, self.keep_scores)):
                results.append(tree_flatten(forward(*batch_arguments, **kwargs, **(more(numbers) if more else {}))))
        outputs = []
        for values in zip(*(leaves for leaves, _ in results), strict=True):
            pairs = zip(values, batches.shapes, strict=True)
            holds_tokens = all(isinstance(value, Tensor) and value.shape[:2] == shape for value, shape in pairs)
            outputs.append(batches.join([value.flatten(0, 1) for value in values])[None] if holds_tokens else None)
        return tree_unflatten(outputs, results[0][1])

    def in_batches(self, multiple: int) -> "RowBatches":
        """Arrange the sequences as the batches of `mix`, in the order in which their lengths first occur."""
        if multiple in self._arranged:
            return self._arranged[multiple]
        numbers, device = rows_by_group([-(-length // multiple) for length in self.lengths]), self.offsets.device
        shapes = [(len(group), max(self.lengths[n] for n in group)) for group in numbers]
        starts = [0, *accumulate(self.lengths)]
        positions, tokens = torch.empty(starts[-1], dtype=torch.int64), list[Tensor]()
        begin = 0
        for group, (_, width) in zip(numbers, shapes, strict=True):
            for n in group:
                tokens.append(starts[n] + torch.arange(width).clamp(max=self.lengths[n] - 1))
                positions[starts[n] : starts[n + 1]] = torch.arange(begin, begin + self.lengths[n])
                begin += width
        unchanged = begin == len(positions) and torch.equal(positions, torch.arange(begin))
        order = None if unchanged else (torch.cat(tokens).to(device), positions.to(device))
        return self._arranged.setdefault(multiple, RowBatches(numbers, shapes, order))

    def row_lengths(self, positions: Tensor) -> Tensor:
        lengths = torch.tensor(self.lengths, device=positions.device)
        return lengths.repeat_interleave(lengths)[None]

    def position_ids(self) -> Tensor:
        """Return each packed token's position in its sequence, (1, N) int64, on the device of `offsets`."""
        positions = torch.cat([torch.arange(length) for length in (0, *self.lengths)])
        return positions.to(self.offsets.device)[None]


@dataclass(frozen=True, eq=False)
class RowBatches:
    """Packed tokens (N, ...) arranged as batches (S, L, ...) of concatenated sequences; shorter ones end in repeats."""

    numbers: list[list[int]]
    """The sequences of each batch."""
    shapes: list[tuple[int, int]]
    """(S, L) of each batch."""
    order: tuple[Tensor, Tensor] | None
    """The token at each position, and the position of each token; None if tokens are already packed in this order."""

    def split(self, flat: Tensor) -> list[Tensor]:
        """Arrange packed tokens (N, ...) as batches (S, L, ...)."""
        ordered = flat if self.order is None else GatheredRows.apply(flat, *self.order)
        # split, not slices: the backward of a split is one concatenation, that of a slice is N zeros each
        parts = ordered.split([count * length for count, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, batches: Sequence[Tensor]) -> Tensor:
        """Invert `split`, given batches (S * L, ...)."""
        joined = batches[0] if len(batches) == 1 else torch.cat(list(batches))
        return joined if self.order is None else _Packed.apply(joined, self.order[1])


class GatheredRows(torch.autograd.Function):
    """Gather the rows `tokens`; the backward pass uses only one position of each row, in `positions`, as repeated rows
    have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return flat.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gradients[0].index_select(0, positions), None, None


class _Packed(torch.autograd.Function):
    """Select rows at distinct positions. Gradients are copied back, where index_select would add them to zeros."""

    @staticmethod
    def forward(ctx: Any, batches: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.count = len(batches)
        return batches.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, positions, gradient), None


def token_dimension(leaf: Any, tokens: int) -> int | None:
    """Return the token dimension of a mixer's argument, which follows one of size 1; None for other arguments."""
    if not isinstance(leaf, Tensor):
        return None
    for dimension in (1, 2):
        if leaf.dim() > dimension and leaf.shape[dimension - 1] == 1 and leaf.shape[dimension] == tokens:
            return dimension
    return None


@dataclass(frozen=True, eq=False)
class EqualRows(AttentionContext):
    """The context within a mixer: a batch of S sequences of L tokens."""

    shape: tuple[int, int]
    keep_scores: bool

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with queries (S, H, L, D); returns (S, L, H, E)."""
        states = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return attend_equal(states[0], states[1], states[2], scores, self.keep_scores).unflatten(0, self.shape)


def attends_compiled(model: nn.Module) -> bool:
    """Return True if a model's attention layers may use the compiled kernel."""
    return any(getattr(module, COMPILED, False) for module in model.modules())


def attend_compiled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    offsets: Tensor,
    longest: int,
    families: Tensor | None = None,
) -> Tensor | None:
    """Attend by the compiled kernel, see `attend_short`; return None if it does not support the layer or its inputs."""
    if not scores.plain or not getattr(module, COMPILED, False):
        return None
    return attend_short(query, key, value, offsets, longest, scores.scaling, scores.window, families)


def attend_equal(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, keep_scores: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Attend within S sequences of L tokens, (S, L, heads, D) each, causally or under another mask, (L, L) or (S, 1, L,
    L); returns (S * L, H, E).

    `keep_scores` lets a CPU keep the scores of short sequences for the backward pass: faster, but not bitwise equal for
    every S.
    """
    (sequences, length, heads, _), groups = query.shape, key.shape[2]
    if mask is None and min(scores.window or length, scores.chunk or length) < length:
        positions = torch.arange(length, device=query.device)
        mask = scores.visible(positions[:, None], positions[None, :])
    saves_scores = keep_scores and query.device.type == "cpu" and length <= SHORT
    if not saves_scores and scores.softcap is None and scores.sinks is None:
        output = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scaling,
            enable_gqa=heads != groups,
        )
        return output.transpose(1, 2).flatten(0, 1)
    # Two matrix products: the blocked kernel's backward is slow on short sequences. Query heads that share a key head
    # count as more queries.
    queries = query.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    sinks = scores.sinks
    if sinks is not None:
        sinks = sinks.view(1, groups, -1, 1).expand(sequences, -1, -1, length).flatten(2)[..., None]
    hidden = additive(visible, torch.promote_types(query.dtype, torch.float32))
    hidden = hidden.repeat(*(1,) * (visible.dim() - 2), heads // groups, 1)
    output = attend_plainly(queries, key.transpose(1, 2), value.transpose(1, 2), scores, hidden, sinks)
    return output.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).reshape(sequences * length, heads, -1)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores: 0 where a query sees a key, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, rule: Scores, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attend with queries (..., Q, D) to keys (..., K, D) by plain operations in at least float32; returns (..., Q, E).

    Supports what fused kernels do not: soft caps, and sinks (..., Q, 1), which receive a share of the weight. `mask` is
    additive.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    products = torch.matmul(query.to(dtype) * rule.scaling, key.to(dtype).transpose(-1, -2))
    if rule.softcap is not None:
        products = rule.softcap * torch.tanh(products / rule.softcap)
    products = products.add_(mask)
    if sinks is None:
        return torch.matmul(products.softmax(-1), value.to(dtype)).to(query.dtype)
    weights = torch.cat([products, sinks.to(dtype)], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, value.to(dtype)).to(query.dtype)

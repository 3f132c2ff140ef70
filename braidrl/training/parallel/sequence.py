"""Sequence and context parallelism: ranks shard the tokens of a micro-batch. Within attention, `sequence` ranks shard
heads (Ulysses), and `context` ranks gather keys and values. With both, each context rank's slice of tokens is sharded
over the sequence ranks.

sequence 0   tokens 0..n    all heads ╮              ╭ all tokens   heads 0..h    ╮              ╭ tokens 0..n
sequence 1   tokens n..2n   all heads ┴─ all-to-all ─┴ all tokens   heads h..2h   ┴─ all-to-all ─┴ tokens n..2n

context 0    queries, keys, values 0..n  ╮              ╭ queries 0..n/2 and 3n/2..2n   keys, values 0..2n
context 1    queries, keys, values n..2n ┴─ all-gather ─┴ queries n/2..3n/2             keys, values 0..2n

Everything but attention and mixers works token by token. Mixers need whole sequences: before a mixer, each rank
receives all tokens of some sequences. Predictions are gathered, so that each rank computes the global loss; its
backward pass covers the local tokens, and the gradient is the sum over ranks.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.training.compute.attention import (
    AttentionContext,
    Forward,
    GatheredRows,
    PackedSequences,
    Scores,
    attend_equal,
    token_dimension,
)
from braidrl.training.compute.packed import HIDDEN, Packed, Predict

QUERIES = 1024
"""Queries that attend at a time under context parallelism: the mask has this many rows."""
LONG = 8192
"""Keys from which on a block's mask is computed again in the backward pass, not kept."""


@dataclass(frozen=True)
class TokenGroups:
    """This rank's process groups for the tokens of a replica, which `tokens` ranks shard in their order."""

    tokens: dist.ProcessGroup
    heads: dist.ProcessGroup
    """The `sequence` ranks: consecutive ranks of `tokens`."""
    context: dist.ProcessGroup


@dataclass(frozen=True, eq=False)
class ShardedAttention(AttentionContext):
    """Attention over sequences whose tokens are sharded equally over S · C ranks, n tokens on each."""

    sequences: AttentionContext
    groups: TokenGroups

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with local queries (1, H, n, D) to keys and values (1, K, n, D); returns (1, n, H, D).

        S must divide H and K.
        """
        heads = self.groups.heads
        by_rank = (heads.size(), -1)
        if scores.sinks is not None:
            scores = replace(scores, sinks=scores.sinks.unflatten(0, by_rank)[heads.rank()])
        # (1, heads, n, D) to (1, heads / S, S · n, D): all tokens of this context rank, of this rank's heads
        states = [
            AllToAll.apply(tensor[0].unflatten(0, by_rank), None, None, heads).transpose(0, 1).flatten(1, 2)[None]
            for tensor in (query, key, value)
        ]
        if self.groups.context.size() == 1:
            output = self.sequences.attend(module, states[0], states[1], states[2], scores)
        else:
            output = self._attend_to_gathered(states[0], states[1], states[2], scores)
        parts = AllToAll.apply(output[0].unflatten(0, by_rank), None, None, heads)
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend with the queries (1, H, m, D) of all context ranks to their keys and values (1, K, m, D); returns the
        outputs of this rank's queries, (1, m, H, D).
        """
        context = self.groups.context
        # (1, heads, m, D) to (tokens, heads, D)
        keys, values = (_AllGather.apply(states[0].transpose(0, 1), context) for states in (key, value))
        shares = EqualShares(query.shape[2], context)
        queries = shares.exchanged(query[0].transpose(0, 1))
        outputs = [
            self._attend_from(first, part, keys, values, scores)
            for first, part in zip(shares.starts, queries.split(shares.sizes), strict=True)
        ]
        return shares.returned(torch.cat(outputs))[None]

    def _attend_from(self, first: int, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Attend with the queries (n, H, D) from token `first` on to the keys and values (tokens, K, D) of all tokens;
        returns (n, H, D).
        """
        assert isinstance(self.sequences, PackedSequences), "context parallelism does not share prompts"
        outputs, start = [values.new_empty((0, queries.shape[1], values.shape[2]))], 0
        for length in self.sequences.lengths:
            begin, end = max(start, first), min(start + length, first + len(queries))
            for low in range(begin, end, QUERIES):
                high = min(low + QUERIES, end)
                # No query sees keys before the window, or later keys except those of the same image.
                oldest = start if scores.window is None else max(start, low - scores.window + 1)
                newest = high if self.sequences.blocks is None else start + length
                block = partial(self._attend_to_block, scores, start, low, oldest)
                visible = queries[low - first : high - first], keys[oldest:newest], values[oldest:newest]
                # The masks of long rows would take the memory of all pairs of tokens until the backward pass.
                is_long = torch.is_grad_enabled() and newest - oldest > LONG
                outputs.append(checkpoint(block, *visible, use_reentrant=False) if is_long else block(*visible))
            start += length
        return torch.cat(outputs)

    def _attend_to_block(
        self, scores: Scores, start: int, low: int, oldest: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend with the queries from token `low` on to the keys from `oldest` on, of a row that begins at `start`."""
        positions = [
            torch.arange(begin, begin + len(of), device=of.device) for begin, of in ((low, query), (oldest, key))
        ]
        blocks = self.sequences.blocks if isinstance(self.sequences, PackedSequences) else None
        numbers = None if blocks is None else (blocks[positions[0], None], blocks[None, positions[1]])
        mask = scores.visible(positions[0][:, None] - start, positions[1][None, :] - start, numbers)
        return attend_equal(query[None], key[None], value[None], scores, mask=mask)

    def row_lengths(self, positions: Tensor) -> Tensor:
        every = self.sequences.row_lengths(positions)
        return every.chunk(self.groups.tokens.size(), -1)[self.groups.tokens.rank()]

    def mix(self, module: nn.Module, forward: Forward, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a mixer over all tokens of this rank's sequences, with an all-to-all before and after it."""
        sequences, order, inverse, sent, arriving = self._exchange
        received = sum(arriving)

        def arrived(leaf: Any) -> Any:
            dimension = token_dimension(leaf, len(order))
            if dimension is None:
                return leaf
            flat = GatheredRows.apply(leaf.squeeze(dimension - 1).movedim(dimension - 1, 0), order, inverse)
            flat = AllToAll.apply(flat, sent, arriving, self.groups.tokens)
            if not received:
                # a rank without a sequence runs a filler token, so that its parameters have gradients
                flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
            return flat.movedim(0, dimension - 1).unsqueeze(dimension - 1)

        def returned(leaf: Any) -> Any:
            if token_dimension(leaf, sum(sequences.lengths)) != 1:
                return leaf
            flat = AllToAll.apply(leaf[0, :received], arriving, sent, self.groups.tokens)
            return GatheredRows.apply(flat, inverse, order)[None]

        outputs = sequences.mix(module, forward, tree_map(arrived, arguments), tree_map(arrived, named))
        return tree_map(returned, outputs)

    @cached_property
    def _exchange(self) -> tuple[PackedSequences, Tensor, Tensor, list[int], list[int]]:
        """Plan the all-to-all that gives a rank all tokens of some sequences: each goes to the rank with the fewest
        tokens, longest first.

        Returns this rank's sequences, with one filler token if it has none; the local tokens (n,) sorted by receiver;
        the position of each local token in that order; the numbers of tokens for each rank and from each rank.
        """
        assert isinstance(self.sequences, PackedSequences), "models with mixers do not share prompts"
        lengths, device, rank = self.sequences.lengths, self.sequences.offsets.device, self.groups.tokens.rank()
        loads, assigned = [0] * self.groups.tokens.size(), [0] * len(lengths)
        for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
            assigned[number] = loads.index(min(loads))
            loads[assigned[number]] += lengths[number]
        local_lengths = [length for length, owner in zip(lengths, assigned, strict=True) if owner == rank]
        owner = torch.tensor(assigned).repeat_interleave(torch.tensor(lengths)).view(len(loads), -1)
        order = owner[rank].argsort(stable=True)
        return (
            PackedSequences.of(local_lengths or [1], device, self.sequences.keep_scores),
            order.to(device),
            order.argsort().to(device),
            owner[rank].bincount(minlength=len(loads)).tolist(),
            (owner == rank).sum(1).tolist(),
        )


def predict_own_tokens(
    predict: Predict, groups: TokenGroups, multiple: int, packed: Packed, *objective: Any
) -> dict[str, Tensor]:
    """Call `predict` on this rank's share of the tokens; all token ranks call this with the same rows.

    Tokens are padded to a `multiple` of the number of ranks. Every rank gets the predictions of all tokens, and the
    hidden states of its tokens.
    """
    packed = packed.padded(-(-len(packed.input_ids) // multiple) * multiple)
    group = groups.tokens
    if group.size() == 1:
        return predict(packed, *objective)
    # `hidden` is already local.
    count = len(packed.input_ids) // group.size()
    first = group.rank() * count
    local_positions = torch.arange(first, first + count, device=packed.input_ids.device)
    local = replace(packed.select(local_positions), context=ShardedAttention(packed.attention(), groups))
    predicted = predict(local, *objective)
    every = torch.arange(len(packed.input_ids), device=packed.input_ids.device)
    of_name = {"scores": packed.row_ends, ROUTED_EXPERTS: every}
    for name, values in predicted.items():
        if name == HIDDEN:
            continue
        # Ranks have different numbers of predictions.
        predictors = of_name.get(name, packed.predictors)
        counts = (predictors // count).bincount(minlength=group.size()).tolist()
        parts = [values.new_empty((max(counts), *values.shape[1:])) for _ in counts]
        if max(counts):
            padded = pad(values.detach(), (*[0, 0] * (values.dim() - 1), 0, max(counts) - len(values)))
            dist.all_gather(parts, padded, group=group)
        parts = [part[:number] for part, number in zip(parts, counts, strict=True)]
        parts[group.rank()] = values  # with its gradient
        predicted[name] = torch.cat(parts)
    return predicted


class EqualShares:
    """Shares of equal work for context ranks: a later token of a row attends to more keys.

    Each rank's m tokens are two chunks, 2C of all ranks. Rank r attends with chunk r and with the r-th last one:

        chunk   0 1 | 2 3 | 4 5      rank 0: 0 and 5    rank 1: 1 and 4    rank 2: 2 and 3
    """

    def __init__(self, count: int, context: dist.ProcessGroup) -> None:
        """Plan the exchange for `count` tokens of each rank."""
        ranks, rank = context.size(), context.rank()
        self._context, self._halves = context, (count - count // 2, count // 2)
        self._chunks = sorted((2 * rank, 2 * rank + 1), key=lambda chunk: attending_rank(chunk, ranks))
        """The chunks of this rank's tokens, in the order of the ranks that attend with them."""
        attended = rank, 2 * ranks - 1 - rank
        self.starts = [chunk // 2 * count + chunk % 2 * self._halves[0] for chunk in attended]
        """The first tokens of the chunks with which this rank attends."""
        self.sizes = [self._halves[chunk % 2] for chunk in attended]
        """Their numbers of tokens."""
        self._sent, self._arriving = [0] * ranks, [0] * ranks
        for chunk in self._chunks:
            self._sent[attending_rank(chunk, ranks)] += self._halves[chunk % 2]
        for chunk in attended:
            self._arriving[chunk // 2] += self._halves[chunk % 2]

    def exchanged(self, rows: Tensor) -> Tensor:
        """Return the rows (n, ...) of the chunks with which this rank attends, from those of its tokens (m, ...)."""
        parts = rows.split(self._halves)
        ordered = torch.cat([parts[chunk % 2] for chunk in self._chunks])
        return AllToAll.apply(ordered, self._sent, self._arriving, self._context)

    def returned(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, (m, ...), from those of the chunks with which it attends."""
        back = AllToAll.apply(rows, self._arriving, self._sent, self._context)
        parts = dict(zip(self._chunks, back.split([self._halves[chunk % 2] for chunk in self._chunks]), strict=True))
        return torch.cat([parts[chunk] for chunk in sorted(parts)])


def attending_rank(chunk: int, ranks: int) -> int:
    """Return the context rank that attends with a chunk of the 2 · ranks chunks of tokens."""
    return min(chunk, 2 * ranks - 1 - chunk)


class AllToAll(torch.autograd.Function):
    """The all-to-all of (n, ...): `sent` rows to each rank and `arriving` ones from each; equal parts without them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int] | None, arriving: list[int] | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = arriving, sent, group
        received = rows.new_empty((len(rows) if arriving is None else sum(arriving), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), arriving, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradients[0], *ctx.back), None, None, None


class _AllGather(torch.autograd.Function):
    """The rows (n, ...) of all ranks in their order; the backward sums each rank's gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty((group.size() * len(rows), *rows.shape[1:]))
        dist.all_gather(list(gathered.chunk(group.size())), rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = list(gradients[0].contiguous().chunk(ctx.group.size()))
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, parts, group=ctx.group)
        return summed, None

"""Sequence parallelism after Ulysses: ranks divide the tokens of a micro-batch, and within attention the heads.

rank 0   tokens 0..n    all heads ╮              ╭ all tokens   heads 0..h    ╮              ╭ tokens 0..n
rank 1   tokens n..2n   all heads ┴─ all-to-all ─┴ all tokens   heads h..2h   ┴─ all-to-all ─┴ tokens n..2n

Everything but attention is computed token by token. Predictions are gathered, so that each rank has the global loss; its backward
takes the gradients of the local tokens, and their sum over the ranks is the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.training.compute.attention import AttentionContext
from braidrl.training.compute.packed import Packed
from braidrl.training.parallel.replicated import Predict


@dataclass(frozen=True, eq=False)
class UlyssesAttention:
    """Attention over sequences whose tokens are divided equally among the S ranks of `group`, n tokens on each."""

    sequences: AttentionContext
    group: dist.ProcessGroup

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attend with local queries (1, H, n, D) to keys and values (1, K, n, D); returns (1, n, H, D). S must divide H and K."""
        whole = [self._all_tokens(states) for states in (query, key, value)]
        output = self.sequences.attend(module, whole[0], whole[1], whole[2], scaling, window)
        by_rank = output[0].unflatten(0, (self.group.size(), -1))
        return _AllToAll.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)[None]

    def _all_tokens(self, states: Tensor) -> Tensor:
        """Exchange (1, heads, n, D) for (1, heads / S, S · n, D)."""
        by_rank = states[0].unflatten(0, (self.group.size(), -1))
        return _AllToAll.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True)
class LocalPacked(Packed):
    """One rank's tokens of a packed micro-batch; `sequence_lengths` are those of all ranks together."""

    group: dist.ProcessGroup

    def attention(self) -> UlyssesAttention:
        return UlyssesAttention(super().attention(), self.group)


def sequence_parallel(predict: Predict, group: dist.ProcessGroup, join: bool = True) -> Predict:
    """Wrap `predict` so that the ranks of `group` divide the tokens; each of them calls it with the same rows.

    With `join` every rank gets the predictions of all tokens, without it those of its own tokens.
    """

    def predict_local(packed: Packed, *objective: Any) -> dict[str, Tensor]:
        found = predict(local_tokens_of(packed, group), *objective)
        return {name: all_gather_values(values, group) if join else values for name, values in found.items()}

    return predict_local


def local_tokens_of(packed: Packed, group: dist.ProcessGroup) -> LocalPacked:
    """Pad a micro-batch so that it divides, and return this rank's tokens; `hidden` is local already."""
    count = -(-len(packed.input_ids) // group.size())
    packed = packed.padded(count * group.size())
    first = group.rank() * count
    here = (packed.predictors >= first) & (packed.predictors < first + count)
    ends = packed.row_ends[(packed.row_ends >= first) & (packed.row_ends < first + count)]
    own = slice(first, first + count)
    return LocalPacked(
        packed.input_ids[own], packed.position_ids[own], packed.sequence_lengths, packed.predictors[here] - first,
        packed.targets[here], packed.offsets, ends - first, group, hidden=packed.hidden,
    )  # fmt: skip


def all_gather_values(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather values of different lengths from all ranks, in the order of ranks. Differentiable."""
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    return _AllGather.apply(values, [int(count) for count in counts], group)


class _AllToAll(torch.autograd.Function):
    """All-to-all of (S, ...): part j goes to rank j, and part j of the result came from rank j."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradients[0], ctx.group), None


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=group)
    return found


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        before = sum(counts[: group.rank()])
        ctx.own = slice(before, before + len(values))
        most = values.new_zeros(max(counts))
        most[: len(values)] = values
        found = [torch.empty_like(most) for _ in counts]
        if len(most):
            dist.all_gather(found, most, group=group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own], None, None

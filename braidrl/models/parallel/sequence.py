"""Sequence parallelism after Ulysses: ranks divide the tokens of a micro-batch, and within attention the heads.

rank 0   tokens 0..n    all heads ╮              ╭ all tokens   heads 0..h    ╮              ╭ tokens 0..n
rank 1   tokens n..2n   all heads ┴─ exchange ───┴ all tokens   heads h..2h   ┴─ exchange ───┴ tokens n..2n

Everything but attention is computed token by token. What is predicted is joined, so that each rank has the whole loss; its backward
takes the gradients of its own tokens, and their sum over the ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.models.compute.attention import AttentionContext
from braidrl.models.compute.packed import Packed
from braidrl.models.parallel.replicated import Predict


@dataclass(frozen=True, eq=False)
class DividedSequences:
    """The attention of sequences whose tokens lie on the ranks of `group`, equally many on each. S ranks, n tokens on each."""

    sequences: AttentionContext
    group: dist.ProcessGroup

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Queries (1, H, n, D), keys and values (1, K, n, D) to outputs (1, n, H, D), where S divides H and K."""
        whole = [self._whole_sequences(states) for states in (query, key, value)]
        output = self.sequences.attend(module, whole[0], whole[1], whole[2], scaling, window)
        by_rank = output[0].unflatten(0, (self.group.size(), -1))
        return _Exchanged.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)[None]

    def _whole_sequences(self, states: Tensor) -> Tensor:
        """(1, heads, n, D) to (1, heads / S, S · n, D)."""
        by_rank = states[0].unflatten(0, (self.group.size(), -1))
        return _Exchanged.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True)
class PackedShare(Packed):
    """One rank's tokens of a packed micro-batch; `sequence_lengths` are those of all."""

    group: dist.ProcessGroup

    def attention(self) -> DividedSequences:
        return DividedSequences(super().attention(), self.group)


def divided(predict: Predict, group: dist.ProcessGroup, join: bool = True) -> Predict:
    """A prediction whose tokens the ranks of `group` divide; each of them calls it with the same rows and has the whole result.

    Without `join` each has that of its own tokens.
    """

    def together(packed: Packed, *objective: Any) -> dict[str, Tensor]:
        found = predict(share_of(packed, group), *objective)
        return {name: joined(values, group) if join else values for name, values in found.items()}

    return together


def share_of(packed: Packed, group: dist.ProcessGroup) -> PackedShare:
    """This rank's tokens, after enough tokens of no row are added that every rank has as many; `hidden` is already its own."""
    count = -(-len(packed.input_ids) // group.size())
    packed = packed.padded(count * group.size())
    first = group.rank() * count
    here = (packed.predictors >= first) & (packed.predictors < first + count)
    ends = packed.row_ends[(packed.row_ends >= first) & (packed.row_ends < first + count)]
    own = slice(first, first + count)
    return PackedShare(
        packed.input_ids[own], packed.position_ids[own], packed.sequence_lengths, packed.predictors[here] - first,
        packed.targets[here], packed.offsets, ends - first, group, hidden=packed.hidden,
    )  # fmt: skip


def joined(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's values, one rank's after the other's."""
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    return _Joined.apply(values, [int(count) for count in counts], group)


class _Exchanged(torch.autograd.Function):
    """(S, ...): part j goes to rank j, and part j of the result came from rank j."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return exchanged(gradients[0], ctx.group), None


def exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=group)
    return found


class _Joined(torch.autograd.Function):
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

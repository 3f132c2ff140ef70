"""Sums over the ranks that hold copies of one model: the only thing that data-parallel workers say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Gradients that are summed in one message."""


@dataclass(frozen=True)
class DataParallel:
    """The ranks of one role. Without a process group there is one rank, and every sum is what it was."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks, in buckets. Every rank must pass tensors of the same shapes."""
        if self.group is None or self.size == 1:
            return
        for bucket in buckets(tensors):
            joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(joined, group=self.group)
            for tensor, part in zip(bucket, joined.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, cut where they pass BUCKET_BYTES."""
    found: list[list[Tensor]] = []
    for _, run in groupby(tensors, key=lambda tensor: tensor.dtype):
        size = BUCKET_BYTES
        for tensor in run:
            if size >= BUCKET_BYTES:
                found.append([])
                size = 0
            found[-1].append(tensor)
            size += tensor.nbytes
    return found

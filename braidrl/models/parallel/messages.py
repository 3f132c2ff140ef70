"""Bytes of different lengths between the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gathered(message: bytearray, group: dist.ProcessGroup) -> list[memoryview]:
    """Every rank's bytes, in the order of the group."""
    size = torch.tensor([len(message)])
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [part[: int(count)].numpy().data for part, count in zip(found, sizes, strict=True)]

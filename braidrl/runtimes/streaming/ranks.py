"""The processes of a trained role: the leader tells all what to do and hears what came of it. Bytes only, over gloo.

leader ──share──▶ every rank does its part ──gather──▶ leader
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from braidrl.models.data_parallel import DataParallel

LIMIT_S = 600.0
"""A rank that says nothing for so long is given up."""


class Ranks:
    """One rank's view of its group; a group of one needs no process group."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank, self.size = rank, size
        self.parallel = DataParallel()
        if size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
            )
            self.parallel = DataParallel(dist.group.WORLD)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, message: bytes = b"") -> bytes:
        """The leader's message, on every rank."""
        if self.size == 1:
            return message
        length = torch.tensor([len(message)])
        dist.broadcast(length, 0)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.leads:
            content.numpy()[:] = memoryview(message)
        dist.broadcast(content, 0)
        return content.numpy().tobytes()

    def gather(self, message: bytes) -> Sequence[bytes]:
        """Every rank's message, on every rank."""
        if self.size == 1:
            return [message]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded.numpy()[: len(message)] = memoryview(message)
        everything = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(everything, padded)
        return [found.numpy()[: int(length)].tobytes() for found, length in zip(everything, lengths, strict=True)]

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

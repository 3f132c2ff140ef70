from __future__ import annotations

import os
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.world import Ranks


class MappedFiles:
    """A transport chosen by `rollout.weights: examples/plugins/transport.py:MappedFiles`: processes of a machine map
    each other's files.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.folder = ranks, tempfile.TemporaryDirectory(prefix="braid-transport-", dir="/dev/shm")
        self.path = Path(self.folder.name, "sent")
        self.paths: list[str] = ranks.all_gather("files of the transport", os.fspath(self.path))

    def exchange(self, received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> None:
        self.path.write_bytes(sent.cpu().numpy().data)
        # Each process says where the bytes for the others begin. This also waits until every file is there.
        begins = self.ranks.all_gather("bytes for each process", [0, *accumulate(sizes_out)])
        for peer, part in enumerate(received.split(sizes_in)):
            if len(part):
                end = begins[peer][self.ranks.rank] + len(part)
                whole = torch.from_file(self.paths[peer], size=end, dtype=torch.uint8)
                part.copy_(whole[end - len(part) :])
        dist.barrier(group=self.ranks.group)

    def close(self) -> None:
        self.folder.cleanup()

"""The data buffer: holds rows between two stages and moves them from their ranks to the ranks that need them.

put(step, edge)   rows with a target rank each ──▶ in place if no row moves,
take(step, edge)  the rows of this rank               else one all-to-all: each rank receives only its own rows

Rows travel in the common row codec, as one message of bytes per pair of ranks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.data.codec import encode, unpack_rows
from braidrl.data.frames import join
from braidrl.data.packing import balanced_partition, imbalance
from braidrl.data.rows import Rows

IN_PLACE = 1.1
"""Rows stay in place if the fullest rank then has at most this much more work than after the best partition."""


class EdgeKey(NamedTuple):
    """The key of rows in the buffer: the iteration, and the stage that reads them."""

    step: int
    edge: str


class DataBuffer:
    """One rank's part. Every rank puts and takes the same keys. The order of puts is the same; takes may come in any order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.moved_rows = 0
        self._held: dict[EdgeKey, Rows] = {}

    def put(self, key: EdgeKey, rows: Rows, owner: Tensor, target: Tensor) -> None:
        """Put `rows`, this rank's rows of a table located on `owner` (B,), for the ranks `target` (B,).

        This rank's rows keep the order of the table. Raises ValueError for a key that is already in the buffer.
        """
        if key in self._held:
            raise ValueError(f"{key} is in the buffer and has not been taken")
        self._held[key] = rows if torch.equal(owner, target) else self._exchanged(key, rows, owner, target)

    def take(self, key: EdgeKey) -> Rows:
        """Remove and return this rank's rows. Raises KeyError for a missing key."""
        return self._held.pop(key)

    def _exchanged(self, key: EdgeKey, rows: Rows, owner: Tensor, target: Tensor) -> Rows:
        rank = self.world.rank
        places = (owner == rank).nonzero().flatten()
        wanted = target[places]
        messages: list[bytes | bytearray] = [b""] * self.world.size
        for to in set(wanted.tolist()) - {rank}:
            messages[to] = join(encode(rows.take((wanted == to).nonzero().flatten())))
        received = self.world.exchange(f"rows for {key.edge} of step {key.step}", messages)
        parts = [unpack_rows(message) for message in received if len(message)]
        self.moved_rows += sum(map(len, parts))
        parts.append(rows.take((wanted == rank).nonzero().flatten()))
        sources = [*(r for r, message in enumerate(received) if len(message)), rank]
        coming = [((owner == source) & (target == rank)).nonzero().flatten() for source in sources]
        return Rows.cat(parts).take(torch.cat(coming).argsort())


def balanced_owners(costs: Sequence[int], owner: Tensor, ranks: int, groups: Sequence[int] | None = None) -> Tensor:
    """Return each row's rank (B,): `owner` if it is balanced enough, else the result of the partition function.

    With `groups`, one number per row, rows of a group stay together. A new part goes, the fullest first, to the rank that already
    has most of it.
    """
    parts = balanced_partition(costs, ranks, groups=groups)
    owners = owner.tolist()
    together = groups is None or len(set(groups)) == len(set(zip(groups, owners, strict=True)))
    holding: list[list[int]] = [[] for _ in range(ranks)]
    for row, holder in enumerate(owners):
        holding[holder].append(row)
    if together and imbalance(costs, holding) <= IN_PLACE * imbalance(costs, parts):
        return owner
    chosen: dict[int, list[int]] = {}
    others = []
    for part in parts:
        here: Counter[int] = Counter()
        for row in part:
            here[owners[row]] += costs[row]
        free = [rank for rank in sorted(here) if rank not in chosen]
        if free:
            chosen[max(free, key=lambda rank: here[rank])] = part
        else:
            others.append(part)
    unused = (rank for rank in range(len(parts)) if rank not in chosen)
    target = torch.empty_like(owner)
    for rank, part in {**chosen, **dict(zip(unused, others, strict=True))}.items():
        target[part] = rank
    return target


def equal_shares(rows: int, ranks: int) -> Tensor:
    """Return owners (B,) of rows without known lengths: equal shares of neighbouring rows for each of `ranks`."""
    return torch.arange(rows) * ranks // max(rows, 1)

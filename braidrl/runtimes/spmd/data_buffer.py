"""The data buffer: where rows wait between two stages, and how they get from the ranks that have them to those that need them.

put(step, edge)   rows with a target rank each ──▶ in place where every row stays everywhere,
take(step, edge)  the rows that this rank is to have  else one all-to-all: to each rank its own rows and no others

Rows travel by the codec that they always travel by, in one message of bytes from rank to rank.
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
"""Rows stay where they are if the fullest rank then has at most this much more to do than after the best partition."""


class EdgeKey(NamedTuple):
    """What rows in the buffer belong to: the iteration, and the stage that they are meant for."""

    step: int
    edge: str


class DataBuffer:
    """One rank's part. Every rank puts and takes the same keys in the same order of puts; takes may come in any order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.moved_rows = 0
        self._held: dict[EdgeKey, Rows] = {}

    def put(self, key: EdgeKey, rows: Rows, owner: Tensor, target: Tensor) -> None:
        """Hand over `rows`, this rank's of a table whose rows lie on `owner` (B,) and are wanted on `target` (B,).

        This rank's rows are in the order of the table, before and after. Raises ValueError for a key that is in the buffer.
        """
        if key in self._held:
            raise ValueError(f"{key} is in the buffer and has not been taken")
        self._held[key] = rows if torch.equal(owner, target) else self._exchanged(key, rows, owner, target)

    def take(self, key: EdgeKey) -> Rows:
        """Return the rows that this rank is to have, which leave the buffer. Raises KeyError for a key that is not there."""
        return self._held.pop(key)

    def _exchanged(self, key: EdgeKey, rows: Rows, owner: Tensor, target: Tensor) -> Rows:
        rank = self.world.rank
        places = (owner == rank).nonzero().flatten()
        wanted = target[places]
        messages = [
            b"" if to == rank else encoded(rows, (wanted == to).nonzero().flatten()) for to in range(self.world.size)
        ]
        received = self.world.exchange(f"rows for {key.edge} of step {key.step}", messages)
        parts = [unpack_rows(message) for message in received if len(message)]
        self.moved_rows += sum(map(len, parts))
        parts.append(rows.take((wanted == rank).nonzero().flatten()))
        sources = [*(r for r, message in enumerate(received) if len(message)), rank]
        coming = [((owner == source) & (target == rank)).nonzero().flatten() for source in sources]
        return Rows.cat(parts).take(torch.cat(coming).argsort())


def encoded(rows: Rows, places: Tensor) -> bytes | bytearray:
    """Return the rows at these places as one message; nothing where there are none."""
    return join(encode(rows.take(places))) if len(places) else b""


def balanced_owners(costs: Sequence[int], owner: Tensor, ranks: int, groups: Sequence[int] | None = None) -> Tensor:
    """Return which rank is to have each row (B,): `owner` where that is balanced enough, else the partition function's answer.

    With `groups`, one for each row, they stay or come together. Of a new partition each part goes, the fullest first, to the rank
    that has most of it already.
    """
    parts = balanced_partition(costs, ranks, groups=groups)
    owners = owner.tolist()
    together = groups is None or len(set(groups)) == len(set(zip(groups, owners, strict=True)))
    holding: list[list[int]] = [[] for _ in range(ranks)]
    for row, holder in enumerate(owners):
        holding[holder].append(row)
    if together and imbalance(costs, holding) <= IN_PLACE * imbalance(costs, parts):
        return owner
    target = torch.empty_like(owner)
    for rank, part in named_parts(parts, costs, owners).items():
        target[part] = rank
    return target


def named_parts(parts: Sequence[list[int]], costs: Sequence[int], owners: Sequence[int]) -> dict[int, list[int]]:
    """Return a rank for each part: the fullest first choose, among those that are left, the one that has most of their rows."""
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
    return {**chosen, **dict(zip(unused, others, strict=True))}


def equal_shares(rows: int, ranks: int) -> Tensor:
    """Return the owners (B,) of rows that cannot be told apart: equally many for each of `ranks`, neighbours together."""
    return torch.arange(rows) * ranks // max(rows, 1)

"""Rows that the ranks of one pool give each other by their process group, while all of them are called together.

each rank   what it needs of whom ──all-to-all──▶ what others need of it ──all-to-all──▶ the rows
"""

from collections.abc import Callable
from typing import NamedTuple

import msgpack
import numpy as np

from braidrl.cluster.world import World
from braidrl.data.codec import encode, unpack_rows
from braidrl.data.frames import join, split
from braidrl.data.rows import Rows
from braidrl.runtimes.hybrid.handles import Numbers


class Asked(NamedTuple):
    """Rows that were asked for: of which rank, and the number of the request among those to it."""

    rank: int
    number: int


class PoolExchange:
    """One exchange; every rank of the pool makes it, also one that needs nothing."""

    def __init__(self, world: World, own: Callable[[int, Numbers, tuple[str, ...]], Rows]) -> None:
        """`own` returns rows that are kept here, by their key, their numbers (n,) and the names of columns."""
        self.world, self.own = world, own
        self.requests: list[list[tuple[int, bytes, tuple[str, ...]]]] = [[] for _ in range(world.size)]

    def ask(self, rank: int, key: int, rows: Numbers, columns: tuple[str, ...]) -> Asked:
        """Note rows that are needed of another rank."""
        self.requests[rank].append((key, rows.astype(np.int64).tobytes(), columns))
        return Asked(rank, len(self.requests[rank]) - 1)

    def rows(self) -> dict[Asked, Rows]:
        """Exchange, and return what was asked for."""
        asked = self.world.exchange("the rows that ranks need", [msgpack.packb(own) for own in self.requests])
        came = self.world.exchange("rows of the pool", [self._answer(requests) for requests in asked])
        return {
            Asked(rank, number): unpack_rows(packed)
            for rank, message in enumerate(came)
            if len(message)
            for number, packed in enumerate(split(message))
        }

    def _answer(self, requests: memoryview) -> bytearray:
        wanted = [
            (key, np.frombuffer(rows, np.int64), tuple(columns)) for key, rows, columns in msgpack.unpackb(requests)
        ]
        return join([join(encode(self.own(*each))) for each in wanted]) if wanted else bytearray()

"""Exchange of rows between the ranks of a pool by their process group.

each rank   its requests to each other rank ──all-to-all──▶ the others' requests to it ──all-to-all──▶ payload
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidrl.cluster.world import World
from braidrl.data.codec import encode, unpack_rows
from braidrl.data.frames import join, split
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Rows


class Asked(NamedTuple):
    """A request for rows: the rank that has them, and the number of the request among those to that rank."""

    rank: int
    number: int


class PoolExchange:
    """One exchange of the pool. It is collective: a rank that needs nothing takes part too."""

    def __init__(self, world: World, own: Callable[[int, NDArray[np.int64], tuple[str, ...]], Rows]) -> None:
        """Start an exchange; `own` returns local rows, given their key, their numbers (n,) and the names of columns."""
        self.world, self.own = world, own
        self.requests: list[list[tuple[int, bytes, tuple[str, ...]]]] = [[] for _ in range(world.size)]

    def ask(self, rank: int, key: int, rows: NDArray[np.int64], columns: tuple[str, ...]) -> Asked:
        """Add a request to another rank."""
        self.requests[rank].append((key, rows.astype(np.int64).tobytes(), columns))
        return Asked(rank, len(self.requests[rank]) - 1)

    def rows(self) -> dict[Asked, Rows]:
        """Exchange the rows; return those of each request."""
        asked = self.world.exchange("the rows that ranks need", [pack_message(own) for own in self.requests])
        came = self.world.exchange("rows of the pool", [self._answer(requests) for requests in asked])
        return {
            Asked(rank, number): unpack_rows(packed)
            for rank, message in enumerate(came)
            if len(message)
            for number, packed in enumerate(split(message))
        }

    def _answer(self, requests: memoryview) -> bytearray:
        wanted = [
            (key, np.frombuffer(rows, np.int64), tuple(columns)) for key, rows, columns in unpack_message(requests)
        ]
        return join([join(encode(self.own(*each))) for each in wanted]) if wanted else bytearray()

"""Cuts a rank's moves into rounds of bounded bytes, over all peers at once: in each round every link carries the same share.

to rank 1   ████████████████████│████████████████████│███████████████████
to rank 2   ████████│████████│███████                        of each peer's bytes, in their order, round k of n has k/n to (k+1)/n
            round 0     round 1     round 2

The number of rounds is all that ranks agree on: as many as the rank with the most bytes needs. Pure functions of the moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from braidrl.weights.boxes import Box
from braidrl.weights.reshard_plan import Ints, Moves


def rounds_needed(moves: Moves, limit_bytes: int) -> int:
    """Return in how many rounds a rank's moves in one direction have at most so many bytes each.

    Raises:
        ValueError: The limit has no room for an element of each peer.
    """
    if not moves.total:
        return 0
    # A share ends at an element, so that each peer may have one more in a round.
    room = limit_bytes - len(np.unique(moves.peers)) * int(moves.item_bytes.max())
    if room <= 0:
        raise ValueError(f"{limit_bytes} bytes are too few for a round with {len(np.unique(moves.peers))} peers")
    return -(-moves.total // room)


@dataclass(frozen=True)
class Piece:
    """What one round has of a move."""

    peer: int
    tensor: int
    box: Box


class Schedule:
    """A rank's moves in one direction in `count` rounds; moves have one element size."""

    def __init__(self, moves: Moves, count: int) -> None:
        self.moves, self.count = moves, count
        self.peers, begins = np.unique(moves.peers, return_index=True)
        self._begins = np.append(begins, len(moves.peers))
        done = np.cumsum(moves.sizes)
        self._totals = np.diff(np.append(0, done)[self._begins])
        # Where each move begins, counted in the bytes of its peer.
        self._starts = done - moves.sizes - np.repeat(np.append(0, done)[begins], np.diff(self._begins))

    def first_rounds(self, tensors: int) -> Ints:
        """Return the round in which each of so many tensors is needed first, `count` for one that is not."""
        found = np.full(tensors, self.count, dtype=np.int64)
        np.minimum.at(found, self.moves.tensors, self._rounds_of(self._starts))
        return found

    def last_rounds(self, tensors: int) -> Ints:
        """Return the round in which each of so many tensors is needed last, -1 for one that is not."""
        found = np.full(tensors, -1, dtype=np.int64)
        last_elements = self._starts + self.moves.sizes - self.moves.item_bytes
        np.maximum.at(found, self.moves.tensors, self._rounds_of(last_elements))
        return found

    def _rounds_of(self, starts: Ints) -> Ints:
        """Return the rounds of the elements that begin at these bytes of each move's peer."""
        totals = np.repeat(self._totals, np.diff(self._begins))
        return ((starts + 1) * self.count - 1) // totals

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of a round, by peer and in the order that both ends know."""
        for place, peer in enumerate(self.peers):
            begin, end, total = int(self._begins[place]), int(self._begins[place + 1]), int(self._totals[place])
            start, stop = total * number // self.count, total * (number + 1) // self.count
            starts = self._starts[begin:end]
            first = begin + max(0, int(np.searchsorted(starts, start, "right")) - 1)
            for move in range(first, begin + int(np.searchsorted(starts, stop))):
                yield from self._within(move, int(peer), start, stop)

    def _within(self, move: int, peer: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield what of a move begins within these bytes."""
        at, item = int(self._starts[move]), int(self.moves.item_bytes[move])
        box = self.moves.shapes[self.moves.boxes[move]]
        first, last = max(0, -((at - start) // item)), min(box.elements, -((at - stop) // item))
        for part in box.span(first, last):
            yield Piece(peer, int(self.moves.tensors[move]), part)

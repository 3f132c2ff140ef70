"""The number of rows that an engine draws at once, by the room of its keys and values.

finished rows ──▶ share: the largest part of its limit that a recent row has drawn
waiting rows ──prompt + share · limit──▶ begin while the keys and values of all running rows fit

A preemption means that rows drew more than their share: it counts as a row that has drawn its whole limit.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

RECENT = 64
"""Finished rows whose lengths are remembered."""
KNOWN = 16
"""Finished rows without which each row is counted with its whole limit."""


class RowTokens(NamedTuple):
    """The tokens of a row: of its prompt, drawn so far, and the most that it may draw."""

    prompt: int
    drawn: int
    limit: int


def rows_to_begin(
    capacity: int, block: int, share: float, running: Iterable[RowTokens], waiting: Iterable[RowTokens]
) -> int:
    """Return how many of the waiting rows, in their order, have room beside the running ones; the first row always has.

    Args:
        capacity: Tokens whose keys and values fit.
        block: Tokens of a block; a row takes whole blocks.
        share: The part of its limit that a row is expected to draw, from 0 to 1.
        running: The rows that are being drawn.
        waiting: The rows that are not.
    """

    def needed(row: RowTokens) -> int:
        tokens = row.prompt + max(row.drawn + 1, round(share * row.limit))
        return -(-min(tokens, row.prompt + row.limit) // block) * block

    taken = [needed(row) for row in running]
    left, begun = capacity - sum(taken), 0
    for row in waiting:
        left -= needed(row)
        if left < 0 and (taken or begun):
            break
        begun += 1
    return begun


class ExpectedShare:
    """The part of their limit that rows draw, as recent ones did."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def value(self) -> float:
        """Return the largest recent part; 1 while too few rows are known."""
        return max(self._recent) if len(self._recent) >= KNOWN else 1.0

    def finished(self, row: RowTokens) -> None:
        """Remember a row that has ended by itself."""
        self._recent.append(row.drawn / row.limit)

    def preempted(self) -> None:
        """Count rows whole again until as many as are remembered have finished."""
        self._recent.append(1.0)

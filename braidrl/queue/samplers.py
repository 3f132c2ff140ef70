"""Samplers: pure functions that choose a consumer's next rows among the rows ready for its task.

ready rows, oldest first ──sampler(ready, most, ranks)──▶ positions of the chosen ones ──▶ a lease

A sampler decides which worker processes a row and when. It affects speed; without staleness it never changes a result.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from braidrl.errors import UserError, users_errors
from braidrl.importing import PluginRegistry


class Candidate(NamedTuple):
    """A ready row; in a task of whole groups, a ready group."""

    row: Any
    group: Any = None
    group_rows: int = 1
    """Rows of its group in work, ready or not."""
    tokens: int = 0
    """Its known length."""
    version: int = 0
    """The oldest version among its tokens."""


Choose = Callable[[Sequence[Candidate], int, int], Sequence[int]]


class Sampler(NamedTuple):
    """A named function, and the number of rows that it sees per row that it may choose."""

    name: str
    choose: Choose
    looks_at: int = 8


def first_in(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the oldest rows."""
    return list(range(min(most, len(ready))))


def whole_groups(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows of complete ready groups, oldest group first; the oldest rows if no group is complete and
    fits.
    """
    positions_of: dict[Any, list[int]] = {}
    for position, candidate in enumerate(ready):
        positions_of.setdefault(candidate.group, []).append(position)
    chosen: list[int] = []
    for rows in positions_of.values():
        if len(rows) == ready[rows[0]].group_rows and len(chosen) + len(rows) <= most:
            chosen += rows
    return chosen or first_in(ready, most, ranks)


def token_balanced(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the oldest row and the rows closest to it in length, a multiple of `ranks`, so that ranks get similar
    numbers of tokens.
    """
    nearest = sorted(range(len(ready)), key=lambda position: (abs(ready[position].tokens - ready[0].tokens), position))
    rows = min(most, len(ready))
    return nearest[: max(rows - rows % ranks, min(rows, ranks))]


def shortest_first(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows with the fewest tokens."""
    return sorted(range(len(ready)), key=lambda position: (ready[position].tokens, position))[:most]


def oldest_version(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows whose tokens have the oldest versions."""
    return sorted(range(len(ready)), key=lambda position: (ready[position].version, position))[:most]


FIRST_IN = Sampler("first_in", first_in, looks_at=1)
SAMPLERS = PluginRegistry(
    "queue sampler",
    {
        function.__name__: f"{__name__}:{function.__name__}"
        for function in (first_in, whole_groups, token_balanced, shortest_first, oldest_version)
    },
)


def sampler_named(name: str) -> Sampler:
    """Return a built-in sampler, or the user's function `module:function` or `path.py:function`.

    Raises UserError if it does not exist.
    """
    return FIRST_IN if name == FIRST_IN.name else Sampler(name, SAMPLERS.find(name))


def checked(sampler: Sampler, ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the choice of a sampler.

    Raises UserError if it fails, and unless it is 1 to `most` different positions in `ready`.
    """
    with users_errors(f"sampler {sampler.name}", sampler.choose):
        chosen = [int(position) for position in sampler.choose(ready, most, ranks)]
    if not 0 < len(chosen) <= most or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(len(ready))):
        raise UserError(
            f"sampler {sampler.name} chose {chosen[:8]} of {len(ready)} rows where at most {most} are wanted; "
            "return 1 to `most` different positions in `ready`"
        )
    return chosen


def check_sampler(name: str, sizes: Iterable[int] = range(1, 33)) -> None:
    """Contract test of a sampler; call it from the sampler's own test.

    Every call must choose different ready rows, at least one and at most `most`. A repeated call must choose the same
    rows, and consecutive calls must choose every row.

    Args:
        name: A built-in sampler, `module:function` or `file.py:function`.
        sizes: Numbers of ready rows to try.

    Raises:
        AssertionError: The contract is broken; the message says where.
    """
    sampler = sampler_named(name)
    for size in sizes:
        for most, ranks in ((1, 1), (3, 2), (size, 1), (64, 4)):
            left = [
                Candidate((0, n // 4, n % 4), n // 4, min(4, size - n // 4 * 4), n * 37 % 101, n % 3)
                for n in range(size)
            ]
            while left:
                before = tuple(left)
                chosen = checked(sampler, left, most, ranks)
                assert tuple(left) == before, f"{name} changes what it is shown"
                assert checked(sampler, left, most, ranks) == chosen, f"{name} chooses differently the second time"
                left = [candidate for position, candidate in enumerate(left) if position not in set(chosen)]

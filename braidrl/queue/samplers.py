"""Samplers: pure functions that choose, of the rows that are ready for a task, those that a consumer is given next.

rows that are ready, oldest first ──sampler(ready, most, ranks)──▶ positions of the chosen ones ──▶ a lease

A sampler changes which worker does a row and when, and so how fast a run is; without staleness it never changes a result.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from braidrl.errors import UserError
from braidrl.importing import PluginRegistry


class Candidate(NamedTuple):
    """A row that is ready. Where a task takes whole groups it stands for its group."""

    row: Any
    group: Any = None
    group_rows: int = 1
    """Rows of its group that are in work, ready or not."""
    tokens: int = 0
    """Length of what is known of it."""
    version: int = 0
    """The oldest weights among its tokens."""


Choose = Callable[[Sequence[Candidate], int, int], Sequence[int]]


class Sampler(NamedTuple):
    """A named function, and how many rows it is shown for each one that it may choose."""

    name: str
    choose: Choose
    looks_at: int = 8


def first_in(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the oldest rows."""
    return list(range(min(most, len(ready))))


def whole_groups(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows of groups of which every row is ready, oldest group first; the oldest rows where no group is and fits."""
    places: dict[Any, list[int]] = {}
    for place, candidate in enumerate(ready):
        places.setdefault(candidate.group, []).append(place)
    chosen: list[int] = []
    for found in places.values():
        if len(found) == ready[found[0]].group_rows and len(chosen) + len(found) <= most:
            chosen += found
    return chosen or first_in(ready, most, ranks)


def token_balanced(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the oldest row and those nearest to it in length, a multiple of `ranks`, so that every rank gets as many tokens."""
    nearest = sorted(range(len(ready)), key=lambda place: (abs(ready[place].tokens - ready[0].tokens), place))
    rows = min(most, len(ready))
    return nearest[: max(rows - rows % ranks, min(rows, ranks))]


def shortest_first(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows with the fewest tokens."""
    return sorted(range(len(ready)), key=lambda place: (ready[place].tokens, place))[:most]


def oldest_version(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the rows whose tokens were drawn by the oldest weights."""
    return sorted(range(len(ready)), key=lambda place: (ready[place].version, place))[:most]


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

    Raises UserError where there is neither.
    """
    return FIRST_IN if name == FIRST_IN.name else Sampler(name, SAMPLERS.find(name))


def checked(sampler: Sampler, ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return what a sampler chooses. Raises UserError unless it is 1 to `most` different positions in `ready`."""
    chosen = [int(place) for place in sampler.choose(ready, most, ranks)]
    if not 0 < len(chosen) <= most or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(len(ready))):
        raise UserError(
            f"sampler {sampler.name} chose {chosen[:8]} of {len(ready)} rows where at most {most} are wanted; "
            "return 1 to `most` different positions in `ready`"
        )
    return chosen


def check_sampler(name: str, sizes: Iterable[int] = range(1, 33)) -> None:
    """Run the contract of samplers on one of them; what its own test calls.

    Every call must choose different rows that are ready, at most as many as wanted and at least one, must choose the same again, and
    calls one after the other must choose every row.

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
                left = [candidate for place, candidate in enumerate(left) if place not in set(chosen)]

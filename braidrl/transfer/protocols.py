"""Transfer protocols: how the arguments of one call reach the workers of a group, and how their results come back.

                    distribute                             collect
driver ── f(x) ──▶ rank 0: f(x0)   rank 1: f(x1)   ... ──▶ one result

A protocol is a pair of pure functions of the group's mesh; who sends the calls, and whether results are values or futures, is none of
its business. `@register(protocol=...)` above a worker's method says which one it is called by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from braidrl.errors import UserError, suggest

Arguments = tuple[Any, ...]
Calls = list[Arguments | None]
"""For each rank the arguments that it is called with, or None where it is not called."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Mesh:
    """The shape of a worker group: how many ranks hold copies of the model."""

    data: int

    @property
    def size(self) -> int:
        """Workers in the group."""
        return self.data


class Divisible(Protocol):
    """Rows that can be dealt out to data-parallel ranks."""

    def divide(self, parts: int) -> Sequence[Any]:
        """One part for each rank; an empty one has length 0."""


@dataclass(frozen=True)
class TransferProtocol:
    """`distribute(mesh, *arguments)` gives each rank its arguments; `collect(mesh, calls, results)` makes one result.

    `results` holds one entry for each rank that was called, in order of ranks.
    """

    name: str
    distribute: Callable[..., Calls]
    collect: Callable[[Mesh, Calls, list[Any]], Any]


PROTOCOLS: dict[str, TransferProtocol] = {}


def define(name: str, distribute: Callable[..., Calls], collect: Callable[[Mesh, Calls, list[Any]], Any]) -> None:
    """Adds a protocol. Raises ValueError for a name that is taken."""
    if name in PROTOCOLS:
        raise ValueError(f"a transfer protocol is called {name} already")
    PROTOCOLS[name] = TransferProtocol(name, distribute, collect)


def register(*, protocol: str) -> Callable[[F], F]:
    """Says by which protocol a worker's method is called. Raises UserError for one that does not exist."""
    if protocol not in PROTOCOLS:
        raise UserError(f"no transfer protocol is called {protocol!r}. {suggest(protocol, PROTOCOLS)}")

    def mark(method: F) -> F:
        method.transfer_protocol = protocol  # type: ignore[attr-defined]
        return method

    return mark


def protocol_of(worker: type, method: str) -> TransferProtocol:
    """The protocol that a method was registered with. Raises TypeError where it was not."""
    name = getattr(getattr(worker, method), "transfer_protocol", None)
    if name is None:
        raise TypeError(f"{worker.__name__}.{method} has no transfer protocol; put @register(protocol=...) above it")
    return PROTOCOLS[name]


def to_everyone(mesh: Mesh, *arguments: Any) -> Calls:
    """The same arguments for every rank."""
    return [arguments] * mesh.size


def to_rank_zero(mesh: Mesh, *arguments: Any) -> Calls:
    return [arguments, *[None] * (mesh.size - 1)]


def one_each(mesh: Mesh, *lists: Sequence[Any]) -> Calls:
    """Rank i gets the i-th of each list. Raises ValueError for a list of another length than the group."""
    for given in lists:
        if len(given) != mesh.size:
            raise ValueError(f"{len(given)} arguments for {mesh.size} workers")
    return list(zip(*lists, strict=True))


def by_rows(mesh: Mesh, rows: Divisible, *arguments: Any) -> Calls:
    """Each data rank gets its part of the rows, and all the same other arguments; a rank without rows is not called."""
    return [(part, *arguments) if len(part) else None for part in rows.divide(mesh.data)]


def by_rows_together(mesh: Mesh, rows: Divisible, *arguments: Any) -> Calls:
    """As `by_rows`, and a rank without rows is called with an empty part: the others compute together with it."""
    return [(part, *arguments) for part in rows.divide(mesh.data)]


def all_results(mesh: Mesh, calls: Calls, results: list[Any]) -> list[Any]:
    return results


def first_result(mesh: Mesh, calls: Calls, results: list[Any]) -> Any:
    return results[0]


def parts_and_results(mesh: Mesh, calls: Calls, results: list[Any]) -> list[tuple[Any, Any]]:
    """Each rank's part of the rows with what it returned for them."""
    parts = [call[0] for call in calls if call is not None]
    return list(zip(parts, results, strict=True))


define("ONE_TO_ALL", to_everyone, all_results)
define("RANK_ZERO", to_rank_zero, first_result)
define("ALL_TO_ALL", one_each, all_results)
define("DP", by_rows, parts_and_results)
define("DP_TOGETHER", by_rows_together, parts_and_results)

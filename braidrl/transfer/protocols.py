"""Transfer protocols: how the arguments of one call reach the workers of a group, and how their results come back.

                    distribute                             collect
driver ── f(x) ──▶ rank 0: f(x0)   rank 1: f(x1)   ... ──▶ one result

A protocol is a pair of pure functions of the group's mesh. `@register(protocol=...)` above a worker's method says by which one it is
called; `docs/add-a-protocol.md` shows how to write one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from braidrl.errors import UserError, suggest
from braidrl.importing import PluginRegistry

Arguments = tuple[Any, ...]
Calls = list[Arguments | None]
"""For each rank the arguments that it is called with, or None where it is not called."""
F = TypeVar("F", bound=Callable[..., Any])
BUILT_IN = ("ONE_TO_ALL", "RANK_ZERO", "ALL_TO_ALL", "DP")


@dataclass(frozen=True)
class Mesh:
    """The shape of a worker group: how many ranks hold copies of the model."""

    data: int

    @property
    def size(self) -> int:
        """Return how many workers the group has."""
        return self.data


@runtime_checkable
class DivisibleTable(Protocol):
    """What a protocol may ask of rows; under hybrid it is a handle, so that none of this moves them."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def divide(self, parts: int) -> Sequence[Any]:
        """Return one table for each rank, of neighbouring rows in their order; some may be empty."""

    def take(self, positions: Sequence[int]) -> Any:
        """Return the rows at these positions, in the order given."""

    @staticmethod
    def cat(tables: Sequence[Any]) -> Any:
        """Return the rows of all tables, one table after the other."""


@dataclass(frozen=True)
class TransferProtocol:
    """A name for messages, and two functions of the mesh.

    `distribute(mesh, *arguments)` returns the arguments of each rank. `collect(mesh, calls, results)` makes one result of those of
    the ranks that were called, in order of ranks.
    """

    name: str
    distribute: Callable[..., Calls]
    collect: Callable[[Mesh, Calls, list[Any]], Any]


PROTOCOLS = PluginRegistry("transfer protocol", {name: f"{__name__}:{name}" for name in BUILT_IN}, TransferProtocol)


@dataclass(frozen=True)
class Registration:
    """How a worker's method is called: its protocol, and the columns that it reads and writes."""

    protocol: TransferProtocol
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def register(
    *, protocol: str | TransferProtocol, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Return a decorator that marks a worker's method as one that the driver calls.

    Args:
        protocol: The name of a protocol in `PROTOCOLS`, `module:name` or `file.py:name` of one of your own, or that itself.
        reads: The columns that the method needs of its rows, as a stage has them; no other payload is fetched.
        writes: The columns that it returns as a mapping, which stay with the worker; without any, its result goes to the driver.

    Raises:
        UserError: No protocol has this name.
    """
    registration = Registration(PROTOCOLS.find(protocol) if isinstance(protocol, str) else protocol, reads, writes)

    def mark(method: F) -> F:
        method.registration = registration  # type: ignore[attr-defined]
        return method

    return mark


def registered(worker: type, method: str) -> Registration:
    """Return how a method of a worker's class is called.

    Raises:
        UserError: The class has no such method, or it was not registered.
    """
    found = getattr(getattr(worker, method, None), "registration", None)
    if not isinstance(found, Registration):
        known = [name for name in dir(worker) if hasattr(getattr(worker, name), "registration")]
        raise UserError(
            f"{worker.__name__} has no method {method!r} with @register(protocol=...) above it. {suggest(method, known)}"
        )
    return found


def to_everyone(mesh: Mesh, *arguments: Any) -> Calls:
    """Call every rank with the same arguments."""
    return [arguments] * mesh.size


def to_rank_zero(mesh: Mesh, *arguments: Any) -> Calls:
    """Call rank 0 alone."""
    return [arguments, *[None] * (mesh.size - 1)]


def one_each(mesh: Mesh, *lists: Sequence[Any]) -> Calls:
    """Call rank i with the i-th of each list. Raises ValueError for a list of another length than the group."""
    for given in lists:
        if len(given) != mesh.size:
            raise ValueError(f"{len(given)} arguments for {mesh.size} workers")
    return list(zip(*lists, strict=True))


def by_rows(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> Calls:
    """Call each data rank with its part of the rows, which may be empty, and the same other arguments."""
    return [(part, *arguments) for part in rows.divide(mesh.data)]


def in_order_of_ranks(mesh: Mesh, calls: Calls, results: list[Any]) -> Any:
    """Return the rows of all ranks as one table where the results are tables, else the list of results."""
    return results[0].cat(results) if results and isinstance(results[0], DivisibleTable) else results


def of_rank_zero(mesh: Mesh, calls: Calls, results: list[Any]) -> Any:
    """Return the only result."""
    return results[0]


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", to_everyone, in_order_of_ranks)
RANK_ZERO = TransferProtocol("RANK_ZERO", to_rank_zero, of_rank_zero)
ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", one_each, in_order_of_ranks)
DP = TransferProtocol("DP", by_rows, in_order_of_ranks)

"""Transfer protocols: how the arguments of one call reach the workers of a group, and how their results come back.

                    distribute                             collect
driver ── f(x) ──▶ rank 0: f(x0)   rank 1: f(x1)   ... ──▶ one result

A protocol is a pair of pure functions of the group's mesh. `@register(protocol=...)` above a worker's method says by which one it is
called; `docs/extend.md` shows how to write one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from braidrl.flow.methods import registration_of
from braidrl.importing import PluginRegistry

Arguments = tuple[Any, ...]
RankCalls = list[Arguments | None]
"""For each rank the arguments that it is called with, or None where it is not called."""
F = TypeVar("F", bound=Callable[..., Any])
BUILT_IN = ("ONE_TO_ALL", "RANK_ZERO", "ALL_TO_ALL", "DP", "THREE_D", "THREE_D_MICRO_DP", "PP_AS_DP", "PP_ONLY")


class MeshCoordinates(NamedTuple):
    """Where a rank is along each axis of its mesh."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The shape of a worker group for one role: ranks along each axis, of which tensor varies fastest and pipeline slowest."""

    data: int
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    generation: tuple[tuple[int, ...], ...] = ()
    """The ranks of each generation group, where ranks generate together: those of one copy of the model are micro data-parallel."""

    @property
    def size(self) -> int:
        """Return how many workers the group has."""
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def places(self) -> list[MeshCoordinates]:
        """Return where each rank is, in order of ranks."""
        axes = (self.pipeline, self.data, self.sequence, self.tensor)
        return [MeshCoordinates(*place) for place in product(*map(range, axes))]

    @property
    def micro_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each generation group; where none were named each rank generates alone."""
        return self.generation or tuple((rank,) for rank in range(self.size))


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
    distribute: Callable[..., RankCalls]
    collect: Callable[[Mesh, RankCalls, list[Any]], Any]


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
    found: Registration = registration_of(worker, method)
    return found


def to_everyone(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call every rank with the same arguments."""
    return [arguments] * mesh.size


def to_rank_zero(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call rank 0 alone."""
    return [arguments, *[None] * (mesh.size - 1)]


def one_each(mesh: Mesh, *lists: Sequence[Any]) -> RankCalls:
    """Call rank i with the i-th of each list. Raises ValueError for a list of another length than the group."""
    for given in lists:
        if len(given) != mesh.size:
            raise ValueError(f"{len(given)} arguments for {mesh.size} workers")
    return list(zip(*lists, strict=True))


def by_rows(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call each rank with its part of the rows, which may be empty, and the same other arguments: ranks of one copy pool theirs."""
    return [(part, *arguments) for part in rows.divide(mesh.size)]


def by_replica(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call all ranks of one copy of the model with the same part of the rows, each copy with its own."""
    parts = rows.divide(mesh.data)
    return [(parts[place.data], *arguments) for place in mesh.places]


def of_last_pipeline_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join what the last pipeline ranks return, which have the model's outputs: one of each copy, in order of data ranks."""
    last = [place.pipeline == mesh.pipeline - 1 and place.sequence == place.tensor == 0 for place in mesh.places]
    return in_order_of_ranks(mesh, calls, [result for result, chosen in zip(results, last, strict=True) if chosen])


def by_generation_group(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call all ranks of a generation group with the same part of the rows, each group with its own."""
    calls: RankCalls = [None] * mesh.size
    for group, part in zip(mesh.micro_groups, rows.divide(len(mesh.micro_groups)), strict=True):
        for rank in group:
            calls[rank] = (part, *arguments)
    return calls


def of_generation_groups(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join what the first rank of each generation group returns, in order of groups."""
    return in_order_of_ranks(mesh, calls, [results[group[0]] for group in mesh.micro_groups])


def by_pipeline_rank(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call pipeline ranks with rows of their own, as if they were data ranks: those of one that divide matrices or tokens with the same."""
    parts = rows.divide(mesh.data * mesh.pipeline)
    return [(parts[place.data * mesh.pipeline + place.pipeline], *arguments) for place in mesh.places]


def of_pipeline_ranks_as_data(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join what each pipeline rank returns, in the order in which the rows were given."""
    places = mesh.places
    first = [rank for rank, place in enumerate(places) if place.sequence == place.tensor == 0]
    ordered = sorted(first, key=lambda rank: (places[rank].data, places[rank].pipeline))
    return in_order_of_ranks(mesh, calls, [results[rank] for rank in ordered])


def of_pipeline_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> list[Any]:
    """Return a list by pipeline rank of what the first rank of each returns."""
    first = [place.data == place.sequence == place.tensor == 0 for place in mesh.places]
    return [result for result, chosen in zip(results, first, strict=True) if chosen]


def in_order_of_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Return the rows of all ranks as one table where the results are tables, else the list of results."""
    return results[0].cat(results) if results and isinstance(results[0], DivisibleTable) else results


def of_rank_zero(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Return the only result."""
    return results[0]


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", to_everyone, in_order_of_ranks)
RANK_ZERO = TransferProtocol("RANK_ZERO", to_rank_zero, of_rank_zero)
ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", one_each, in_order_of_ranks)
DP = TransferProtocol("DP", by_rows, in_order_of_ranks)
THREE_D = TransferProtocol("THREE_D", by_replica, of_last_pipeline_ranks)
THREE_D_MICRO_DP = TransferProtocol("THREE_D_MICRO_DP", by_generation_group, of_generation_groups)
PP_AS_DP = TransferProtocol("PP_AS_DP", by_pipeline_rank, of_pipeline_ranks_as_data)
PP_ONLY = TransferProtocol("PP_ONLY", to_everyone, of_pipeline_ranks)

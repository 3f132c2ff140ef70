"""Transfer protocols: distribute the arguments of one call to the workers of a group, and collect their results.

                    distribute                             collect
driver ── f(x) ──▶ rank 0: f(x0)   rank 1: f(x1)   ... ──▶ one result

A protocol is a pair of pure functions of the group's mesh. `@register(protocol=...)` above a worker's method names the protocol of
its calls; `docs/extend.md` shows how to write one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from braidrl.flow.signatures import registration_of
from braidrl.importing import PluginRegistry

Arguments = tuple[Any, ...]
RankCalls = list[Arguments | None]
"""The arguments of each rank, or None for a rank that is not called."""
F = TypeVar("F", bound=Callable[..., Any])
BUILT_IN = ("ONE_TO_ALL", "RANK_ZERO", "ALL_TO_ALL", "DP", "THREE_D", "THREE_D_MICRO_DP", "PP_AS_DP", "PP_ONLY")


class MeshCoordinates(NamedTuple):
    """The position of a rank along each axis of its mesh."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The shape of a worker group for one role: ranks along each axis; tensor varies fastest and pipeline slowest."""

    data: int
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    generation: tuple[tuple[int, ...], ...] = ()
    """The ranks of each generation group, if ranks generate together: the ranks of one model copy are micro data-parallel."""

    @property
    def size(self) -> int:
        """Return how many workers the group has."""
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def places(self) -> list[MeshCoordinates]:
        """Return the coordinates of each rank, in order of ranks."""
        axes = (self.pipeline, self.data, self.sequence, self.tensor)
        return [MeshCoordinates(*place) for place in product(*map(range, axes))]

    @property
    def micro_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each generation group; without groups each rank generates alone."""
        return self.generation or tuple((rank,) for rank in range(self.size))


@runtime_checkable
class DivisibleTable(Protocol):
    """The operations on rows that a protocol may use; under hybrid rows are a handle, and none of these moves them."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def divide(self, parts: int) -> Sequence[Any]:
        """Return one table per rank, of neighbouring rows in their order; some may be empty."""

    def take(self, positions: Sequence[int]) -> Any:
        """Return the rows at these positions, in the order given."""

    @staticmethod
    def cat(tables: Sequence[Any]) -> Any:
        """Return the rows of all tables, one table after the other."""


@dataclass(frozen=True)
class TransferProtocol:
    """A name for messages, and two functions of the mesh.

    `distribute(mesh, *arguments)` returns the arguments of each rank. `collect(mesh, calls, results)` joins the results of the called
    ranks, in order of ranks.
    """

    name: str
    distribute: Callable[..., RankCalls]
    collect: Callable[[Mesh, RankCalls, list[Any]], Any]


PROTOCOLS = PluginRegistry("transfer protocol", {name: f"{__name__}:{name}" for name in BUILT_IN}, TransferProtocol)


@dataclass(frozen=True)
class Registration:
    """The call of a worker's method: its protocol, and the columns that it reads and writes."""

    protocol: TransferProtocol
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def register(
    *, protocol: str | TransferProtocol, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Return a decorator that registers a worker's method for calls by the driver.

    Args:
        protocol: The name of a protocol in `PROTOCOLS`, `module:name` or `file.py:name` of your own, or the protocol itself.
        reads: Columns that the method needs, as for a stage; no other payload is fetched.
        writes: Columns that it returns as a mapping and that stay with the worker; without any, its result goes to the driver.

    Raises:
        UserError: No protocol has this name.
    """
    registration = Registration(PROTOCOLS.find(protocol) if isinstance(protocol, str) else protocol, reads, writes)

    def mark(method: F) -> F:
        method.registration = registration  # type: ignore[attr-defined]
        return method

    return mark


def registered(worker: type, method: str) -> Registration:
    """Return the registration of a worker's method. Raises UserError for a missing or unregistered method."""
    found: Registration = registration_of(worker, method)
    return found


def to_everyone(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call every rank with the same arguments."""
    return [arguments] * mesh.size


def to_rank_zero(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call only rank 0."""
    return [arguments, *[None] * (mesh.size - 1)]


def one_each(mesh: Mesh, *lists: Sequence[Any]) -> RankCalls:
    """Call rank i with the i-th element of each list. Raises ValueError if a list's length is not the group's."""
    for given in lists:
        if len(given) != mesh.size:
            raise ValueError(f"{len(given)} arguments for {mesh.size} workers")
    return list(zip(*lists, strict=True))


def by_rows(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call each rank with its part of the rows, which may be empty, and the same other arguments; ranks of one copy pool their rows."""
    return [(part, *arguments) for part in rows.divide(mesh.size)]


def by_replica(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call all ranks of one model copy with the same part of the rows; each copy has its own."""
    parts = rows.divide(mesh.data)
    return [(parts[place.data], *arguments) for place in mesh.places]


def of_last_pipeline_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the results of the last pipeline ranks, which have the model's outputs: one per copy, in order of data ranks."""
    last = [place.pipeline == mesh.pipeline - 1 and place.sequence == place.tensor == 0 for place in mesh.places]
    return in_order_of_ranks(mesh, calls, [result for result, chosen in zip(results, last, strict=True) if chosen])


def by_generation_group(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call all ranks of a generation group with the same part of the rows; each group has its own."""
    calls: RankCalls = [None] * mesh.size
    for group, part in zip(mesh.micro_groups, rows.divide(len(mesh.micro_groups)), strict=True):
        for rank in group:
            calls[rank] = (part, *arguments)
    return calls


def of_generation_groups(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the results of the first rank of each generation group, in order of groups."""
    return in_order_of_ranks(mesh, calls, [results[group[0]] for group in mesh.micro_groups])


def by_pipeline_rank(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
    """Call pipeline ranks with their own rows, as if they were data ranks; ranks that split tensors or sequences get the same rows."""
    parts = rows.divide(mesh.data * mesh.pipeline)
    return [(parts[place.data * mesh.pipeline + place.pipeline], *arguments) for place in mesh.places]


def of_pipeline_ranks_as_data(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the result of each pipeline rank, in the order in which the rows were given."""
    places = mesh.places
    first = [rank for rank, place in enumerate(places) if place.sequence == place.tensor == 0]
    ordered = sorted(first, key=lambda rank: (places[rank].data, places[rank].pipeline))
    return in_order_of_ranks(mesh, calls, [results[rank] for rank in ordered])


def of_pipeline_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> list[Any]:
    """Return a list, by pipeline rank, of the result of its first rank."""
    first = [place.data == place.sequence == place.tensor == 0 for place in mesh.places]
    return [result for result, chosen in zip(results, first, strict=True) if chosen]


def in_order_of_ranks(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the rows of all ranks if the results are tables, else return the list of results."""
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

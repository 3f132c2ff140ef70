"""Transfer protocols: distribute the arguments of one call to the workers of a group, and collect their results.

                    distribute                             collect
driver ── f(x) ──▶ rank 0: f(x0)   rank 1: f(x1)   ... ──▶ one result

A protocol is a pair of pure functions of the group's mesh. `@register(protocol=...)` above a worker's method names the
protocol of its calls; `docs/extend.md` shows how to write one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidrl.data.rows import RowTable
from braidrl.importing import PluginRegistry

Arguments = tuple[Any, ...]
RankCalls = list[Arguments | None]
"""The arguments of each rank, or None for a rank that is not called."""
F = TypeVar("F", bound=Callable[..., Any])
BUILT_IN = ("ONE_TO_ALL", "RANK_ZERO", "ALL_TO_ALL", "DP", "THREE_D", "THREE_D_MICRO_DP", "PP_AS_DP", "PP_ONLY")


@dataclass(frozen=True)
class Mesh:
    """The shape of a worker group for one role: ranks along each axis; tensor varies fastest and pipeline slowest."""

    data: int
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    """The ranks that shard a copy's tokens: those of `context` times those of `sequence`."""
    generation: tuple[tuple[int, ...], ...] = ()
    """The ranks of each generation group, if ranks generate together: ranks of a model copy are micro data-parallel."""

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    def ranks(self) -> NDArray[np.int64]:
        """Return the ranks by their coordinates (pipeline, data, rank within one pipeline stage of one copy)."""
        return np.arange(self.size).reshape(self.pipeline, self.data, -1)


@runtime_checkable
class DivisibleTable(RowTable, Protocol):
    """The operations on rows that a protocol may use; under hybrid rows are a handle, which these do not move."""

    def divide(self, parts: int) -> Sequence[Any]:
        """Return one table per rank, of neighbouring rows in their order; some may be empty."""


@dataclass(frozen=True)
class TransferProtocol:
    """A name, and two functions of the mesh: the arguments of each rank, and the joined results of called ranks."""

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
    """Return a decorator that registers a worker's method for calls by the driver. Raises UserError for an unknown
    protocol.

    `protocol` is a name in `PROTOCOLS`, `module:name` or `file.py:name`, or the protocol itself. `reads` are the
    columns that the method needs, as for a stage, and `writes` those that it returns as a mapping and that stay with
    the worker; without any, its result goes to the driver.
    """
    registration = Registration(PROTOCOLS.find(protocol) if isinstance(protocol, str) else protocol, reads, writes)

    def mark(method: F) -> F:
        method.registration = registration  # type: ignore[attr-defined]
        return method

    return mark


def one_each(mesh: Mesh, *lists: Sequence[Any]) -> RankCalls:
    """Call rank i with the i-th element of each list. Raises ValueError if a list's length is not the group's size."""
    for arguments in lists:
        if len(arguments) != mesh.size:
            raise ValueError(f"{len(arguments)} arguments for {mesh.size} workers")
    return list(zip(*lists, strict=True))


def joined(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
    """Join the rows of all ranks if the results are tables, else return the list of results."""
    return results[0].cat(results) if results and isinstance(results[0], DivisibleTable) else results


def by_share(name: str, about: str, shares: Callable[[Mesh], Sequence[Sequence[int]]]) -> TransferProtocol:
    """Return a protocol that divides rows into shares, one for each entry of `shares(mesh)`, which lists ranks.

    The ranks of an entry get the same rows, which may be none, and the first of them answers. All ranks get the same
    other arguments. `about` is the protocol's description in the catalogue.
    """

    def distribute(mesh: Mesh, rows: DivisibleTable, *arguments: Any) -> RankCalls:
        calls: RankCalls = [None] * mesh.size
        takers = shares(mesh)
        for ranks, part in zip(takers, rows.divide(len(takers)), strict=True):
            for rank in ranks:
                calls[rank] = (part, *arguments)
        return calls

    def collect(mesh: Mesh, calls: RankCalls, results: list[Any]) -> Any:
        return joined(mesh, calls, [results[ranks[0]] for ranks in shares(mesh)])

    distribute.__doc__ = about
    return TransferProtocol(name, distribute, collect)


def to_everyone(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call every rank with the same arguments."""
    return [arguments] * mesh.size


def to_rank_zero(mesh: Mesh, *arguments: Any) -> RankCalls:
    """Call only rank 0."""
    return [arguments, *[None] * (mesh.size - 1)]


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", to_everyone, joined)
RANK_ZERO = TransferProtocol("RANK_ZERO", to_rank_zero, lambda mesh, calls, results: results[0])
ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", one_each, joined)
DP = by_share(
    "DP",
    "Call each rank with its part of the rows, which may be empty, and the same other arguments; ranks of one copy "
    "pool their rows.",
    lambda mesh: [[rank] for rank in range(mesh.size)],
)
# The last pipeline ranks have the model's outputs, and answer.
THREE_D = by_share(
    "THREE_D",
    "Call all ranks of one model copy with the same part of the rows; each copy has its own.",
    lambda mesh: np.swapaxes(mesh.ranks()[::-1], 0, 1).reshape(mesh.data, -1).tolist(),
)
# Without groups each rank generates alone.
THREE_D_MICRO_DP = by_share(
    "THREE_D_MICRO_DP",
    "Call all ranks of a generation group with the same part of the rows; each group has its own.",
    lambda mesh: mesh.generation or [[rank] for rank in range(mesh.size)],
)
PP_AS_DP = by_share(
    "PP_AS_DP",
    "Call pipeline ranks with their own rows, as if they were data ranks; ranks that split tensors or sequences get "
    "the same rows.",
    lambda mesh: [ranks.tolist() for copy in np.swapaxes(mesh.ranks(), 0, 1) for ranks in copy],
)
PP_ONLY = TransferProtocol(
    "PP_ONLY", to_everyone, lambda mesh, calls, results: [results[rank] for rank in mesh.ranks()[:, 0, 0]]
)

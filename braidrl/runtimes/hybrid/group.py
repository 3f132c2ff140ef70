"""The workers of a pool as the driver calls them: a method by name, by its transfer protocol; futures at once.

driver ──call("execute", rows, ...)──▶ protocol ──▶ rank 0, rank 1, ... ──▶ Future each ──wait──▶ Answer
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.placement.pools import Pool
from braidrl.runtimes.hybrid.dispatch import Deal
from braidrl.runtimes.hybrid.failures import StageFailure, WorkerFailure, named_rows
from braidrl.runtimes.hybrid.handle import Handle
from braidrl.runtimes.hybrid.parts import Answer, Part, part_of
from braidrl.runtimes.hybrid.worker import HybridWorker
from braidrl.transfer.protocols import Mesh, protocol_of

DEATH_S = 2.0
"""Seconds within which Ray is told of a worker's end, after others have noticed."""


@dataclass(frozen=True, eq=False)
class Future:
    """A call under way: Ray's reference, the worker's number and name, what it does, and on which rows."""

    ref: Any
    worker: int
    who: str
    what: str
    part: Part | None = None

    @property
    def size(self) -> int:
        """How many rows it is about."""
        return len(self.part) if self.part else 0

    @property
    def uids(self) -> list[Any]:
        """Of its rows; made when somebody asks, which is when something has gone wrong."""
        return self.part.uids() if self.part else []


@dataclass(frozen=True, eq=False)
class Outgoing:
    """Rows for one rank, with the futures that its call has to wait for. `positions` says which rows of the table they are."""

    part: Part
    awaited: list[Future]
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, eq=False)
class Dealt:
    """A table to be dealt out to ranks, with the columns `names` that they need; `deal` gives the row positions of each."""

    table: Handle
    deal: Deal
    names: frozenset[str] | None

    def divide(self, parts: int) -> list[Outgoing]:
        return [outgoing(self.table.take(positions), self.names, positions) for positions in self.deal(parts)]


def outgoing(table: Handle, names: frozenset[str] | None = None, positions: Sequence[int] = ()) -> Outgoing:
    """A whole table for one rank."""
    awaited: list[Future] = []
    return Outgoing(part_of(table, awaited, names), awaited, positions)


@dataclass
class DriverTraffic:
    """Bytes that the driver has sent to workers and received from them."""

    sent: int = 0
    received: int = 0


@dataclass(eq=False)
class WorkerGroup:
    """A pool's actors in order of rank; `first` is the number of rank 0 among all workers of the run."""

    pool: Pool
    actors: Sequence[Any]
    first: int
    limit_s: float
    traffic: DriverTraffic
    names: dict[str, str] = field(default_factory=dict)
    """Of all workers of the run, by Ray's id of the actor."""
    forgotten: dict[int, list[int]] = field(default_factory=dict)
    """By rank, chunks that nobody can ask for any more: the worker is told with its next call."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.pool.workers)

    def call(self, method: str, *arguments: Any, aside: bool = False) -> Any:
        """Calls a method of the workers by its protocol and returns what the protocol collects of the futures.

        `aside` calls run beside the one that a worker is busy with.
        """
        protocol = protocol_of(HybridWorker, method)
        calls = protocol.distribute(self.mesh, *arguments)
        futures = [self._send(rank, method, call, aside) for rank, call in enumerate(calls) if call is not None]
        return protocol.collect(self.mesh, calls, futures)

    def release(self, worker: int, key: int) -> None:
        """A worker may forget a chunk."""
        self.forgotten.setdefault(worker - self.first, []).append(key)

    def _send(self, rank: int, method: str, arguments: tuple[Any, ...], aside: bool) -> Future:
        rows = [argument for argument in arguments if isinstance(argument, Outgoing)]
        awaited = rows[0].awaited if rows else []
        plain = tuple(argument.part if isinstance(argument, Outgoing) else argument for argument in arguments)
        # An aside call may overtake others, which still need what is to be forgotten.
        released = () if aside else self.forgotten.pop(rank, ())
        message = pickle.dumps((method, plain, released))
        self.traffic.sent += len(message)
        perform = self.actors[rank].perform
        if aside:
            perform = perform.options(concurrency_group="aside")
        ref = perform.remote(message, *(future.ref for future in awaited))
        what = next((argument.name for argument in plain if isinstance(argument, Stage)), method)
        return Future(ref, self.first + rank, f"{self.pool.name} rank {rank}", what, rows[0].part if rows else None)

    def wait(self, futures: Sequence[Future], arrived: Callable[[Future], None] | None = None) -> list[Answer]:
        """The answers, in order. Raises WorkerFailure for one that failed or says nothing for too long, UserError as the worker did."""
        waiting = {future.ref: future for future in futures}
        packed: dict[Any, bytes] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=self.limit_s)
            if not ready:
                raise WorkerFailure(self._silence(list(waiting.values())))
            for ref in ready:
                future = waiting.pop(ref)
                try:
                    packed[ref] = self._result(future)
                except WorkerFailure:
                    self._raise_deaths(list(waiting.values()))
                    raise
                self.traffic.received += len(packed[ref])
                if arrived:
                    arrived(future)
        return [Answer.of(packed[future.ref]) for future in futures]

    def _result(self, future: Future) -> bytes:
        try:
            result: bytes = ray.get(future.ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            story = str(cause) if isinstance(cause, StageFailure) else f"{future.who} failed in {future.what}:\n{error}"
            raise WorkerFailure(story) from None
        except RayActorError as error:
            who = self.names.get(str(error.actor_id), future.who)
            raise WorkerFailure(
                f"{who} died in {future.what}{named_rows(future.uids)}: {' '.join(str(error).split())}"
            ) from None
        except RayError as error:
            raise WorkerFailure(f"{future.who} failed in {future.what}: {' '.join(str(error).split())}") from None
        return result

    def _raise_deaths(self, others: Sequence[Future]) -> None:
        """A worker that dies makes those fail that were waiting for it; it is the one to be named.

        Any other failure here was not the first to be seen: that one is what the caller raises.
        """
        ready, _ = ray.wait([f.ref for f in others], num_returns=len(others), timeout=DEATH_S) if others else ([], [])
        for future in others:
            if future.ref in ready and isinstance(self._error(future), RayActorError):
                self._result(future)

    @staticmethod
    def _error(future: Future) -> RayError | None:
        """Why a call that has ended failed, or None."""
        try:
            ray.get(future.ref)
        except RayError as error:
            return error
        return None

    def _silence(self, waiting: Sequence[Future]) -> str:
        whom = "; ".join(f"{f.who} ({f.what}{named_rows(f.uids)})" for f in waiting)
        return (
            f"waited {self.limit_s:g} s without a word from {whom}; raise cluster.wait_limit_s if this may take longer"
        )

"""All four runtimes in virtual time, on the scheduling functions that they use: how long a flow would take, and is each row done once.

Under `streaming`, workers may die and answer late, leases expire, and rows are suspended.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from braidrl.data.rows import Uid
from braidrl.flow.stage import Kind
from braidrl.plan.simulation import Runtime, SimulatedLease, SimulatedWorker, Simulation, Streaming, Workload
from braidrl.queue.table import Lease, LeaseLost
from tests.plan.synchronous import Distributed, Eager, Hybrid, TimedWorkload

Fate = Literal["done", "dies", "late"]


@dataclass(frozen=True)
class FailingWorkload(TimedWorkload):
    """A workload for every runtime, with failures under `streaming`."""

    fate: Callable[[int], Fate] = lambda lease: "done"
    """The outcome of a lease: done, the worker dies halfway, or it answers after the lease expired."""
    lease_seconds: float = 1e6
    most_seconds: float = float("inf")
    """Seconds of generation in one batch after which a row is suspended, if `sizes.sets_aside`."""


class FailingStreaming(Streaming):
    """A streaming run with the failures of its workload."""

    def __init__(self, work: FailingWorkload) -> None:
        super().__init__(work)
        self.failures, self.lease_seconds = work, work.lease_seconds
        self.drawn: dict[Uid, float] = {}
        """Seconds that suspended rows have been generated for."""
        self.suspended: dict[int, float] = {}
        """The same of rows that are suspended at the end of a lease."""
        self.watching = False

    def _start(self, worker: SimulatedWorker, lease: Lease, shares: Sequence[float], version: int | None) -> None:
        if worker.consumer.kind is Kind.GENERATE:
            before, limit = self.drawn.get(lease.rows[0], 0.0), self.failures.most_seconds
            shares = [shares[0] - before]
            if shares[0] > limit and self.schedule.may_suspend(lease.rows[0]):
                shares, self.suspended[lease.number] = [limit], before + limit
        super()._start(worker, lease, shares, version)
        work, fate = worker.work[lease.number], self.failures.fate(lease.number)
        if fate != "done":
            seconds = work.end - self.clock.now
            work.end = self.clock.now + (seconds / 2 if fate == "dies" else seconds + self.lease_seconds)
            work.turn += 1
            self.clock.after(work.end - self.clock.now, partial(self._end, worker, work, work.turn))
        self._watch()

    def _end(self, worker: SimulatedWorker, work: SimulatedLease, turn: int) -> None:
        lease = work.lease
        # Another row's end may have been the worker's death.
        if turn != work.turn or lease.number not in worker.work:
            return
        if self.failures.fate(lease.number) == "dies":
            worker.work.clear()
            self.schedule.tasks.give_up(self.schedule.tasks.leases.of(worker.name))
            return
        if lease.number not in self.suspended:
            super()._end(worker, work, turn)
            return
        del worker.work[lease.number]
        # A lost lease has rows that were leased again or dropped.
        with suppress(LeaseLost):
            self.schedule.tasks.leases.current(lease.number, self.clock.now)
            self.schedule.suspend(lease, dict.fromkeys(self.schedule.tasks.left(lease), work.version or 0))
            self.drawn[lease.rows[0]] = self.suspended[lease.number]

    def _watch(self, expired: bool = False) -> None:
        """Give up `expired` leases, and schedule a check when the next one expires."""
        tasks = self.schedule.tasks
        if expired:
            self.watching = False
            tasks.give_up(tasks.leases.expired(self.clock.now))
        deadline = tasks.leases.next_deadline()
        if deadline is not None and not self.watching:
            self.watching = True
            # Slightly later, beyond rounding: a lease exactly at its deadline has not expired.
            seconds = deadline - self.clock.now + self.lease_seconds / 1000
            self.clock.after(seconds, partial(self._watch, expired=True))


def simulate(runtime: Runtime, work: Workload) -> Simulation:
    """Run a workload in virtual time. Raises Deadlock, TooStale or ValueError where a scheduling rule is broken."""
    if isinstance(work, FailingWorkload) and runtime == "streaming":
        return FailingStreaming(work).simulate()
    runs = {"eager": Eager, "hybrid": Hybrid, "distributed": Distributed, "streaming": Streaming}
    return runs[runtime](work).simulate()

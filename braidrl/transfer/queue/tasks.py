"""The tasks of a queue, the leases under which holders have their rows, and the rows in work. Time is an argument.

admit, write ──▶ task: ready rows ──take──▶ lease ──acknowledge──▶ done
                         ▲                   │
                         └──── give up ──────┘   expired, its holder is gone, or one of its rows left
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from braidrl.transfer.queue.samplers import FIRST_IN, Candidate, Sampler
from braidrl.transfer.queue.table import Row
from braidrl.transfer.queue.task import Task


class LeaseLost(RuntimeError):
    """The lease expired or its holder was given up: its rows are someone else's, and what was made of them must not be used."""


@dataclass(frozen=True)
class Lease:
    """Rows that `holder` works on for `task` until `deadline`."""

    number: int
    task: Any
    holder: str
    rows: tuple[Row, ...]
    deadline: float


class Leases:
    """All leases of a queue by number, by holder and by deadline."""

    def __init__(self) -> None:
        self.held: dict[int, Lease] = {}
        self.by_holder: defaultdict[str, set[int]] = defaultdict(set)
        self._deadlines: list[tuple[float, int]] = []
        self.numbers = count()

    def take(
        self, task: Hashable, holder: str, rows: Sequence[Row], now: float, seconds: float, number: int | None = None
    ) -> Lease:
        """Lease rows to a holder for so many seconds, under the next number or one that it was given before."""
        lease = Lease(next(self.numbers) if number is None else number, task, holder, tuple(rows), now + seconds)
        self.by_holder[holder].add(lease.number)
        self._hold(lease)
        return lease

    def current(self, number: int, now: float) -> Lease:
        """Return a lease that still holds. Raises LeaseLost if it has expired or was given up."""
        lease = self.held.get(number)
        if lease is None or lease.deadline < now:
            raise LeaseLost(
                f"lease {number} was lost: it expired or its holder was given up, and its rows are free again"
            )
        return lease

    def renew(self, number: int, now: float, seconds: float) -> Lease:
        """Move the deadline of a holder that is alive and slow. Raises LeaseLost as `current` does."""
        lease = replace(self.current(number, now), deadline=now + seconds)
        self._hold(lease)
        return lease

    def end(self, number: int) -> Lease:
        """Remove a lease. Raises LeaseLost if there is none of this number."""
        if number not in self.held:
            raise LeaseLost(f"lease {number} is not held")
        lease = self.held.pop(number)
        self.by_holder[lease.holder].discard(number)
        if not self.by_holder[lease.holder]:
            del self.by_holder[lease.holder]
        return lease

    def of(self, holder: str) -> list[Lease]:
        """Return the leases of one holder."""
        return [self.held[number] for number in sorted(self.by_holder.get(holder, ()))]

    def expired(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed."""
        found = {}
        while (deadline := self.next_deadline()) is not None and deadline < now:
            number = heappop(self._deadlines)[1]
            # A lease that was renewed twice at one moment is in the heap twice.
            found[number] = self.held[number]
        return list(found.values())

    def next_deadline(self) -> float | None:
        """Return when the first lease expires, or None."""
        while self._deadlines:
            deadline, number = self._deadlines[0]
            if number in self.held and self.held[number].deadline == deadline:
                return deadline
            heappop(self._deadlines)
        return None

    def _hold(self, lease: Lease) -> None:
        self.held[lease.number] = lease
        heappush(self._deadlines, (lease.deadline, lease.number))


class Tasks:
    """All tasks of a queue and the rows in work. A writer is a column, or whoever writes several columns at once."""

    def __init__(self, waits: Mapping[Any, Iterable[str]], whole_groups: Collection[Any] = ()) -> None:
        """Make a task for each key of `waits`, which names the writers that it waits for."""
        self.tasks = {name: Task(writers, name in whole_groups) for name, writers in waits.items()}
        self.leases = Leases()
        self.rows: dict[Row, None] = {}
        self.written: defaultdict[str, set[Row]] = defaultdict(set)
        self.facts: Callable[[Row], Candidate] = lambda row: Candidate(row)
        self._admitted = count()

    def admit(self, rows: Iterable[Row], group: Callable[[Row], Any], table: Any = 0) -> None:
        """Let rows be born in a table. Raises ValueError for one that is in work already."""
        for row in rows:
            if row in self.rows:
                raise ValueError(f"row {row} is admitted twice")
            self.rows[row] = None
            number = next(self._admitted)
            for task in self.tasks.values():
                task.admit(row, number, group(row), table)

    def write(self, writer: str, rows: Sequence[Row]) -> None:
        """Note that rows are written. Raises ValueError where they were: columns do not change."""
        written = self.written[writer]
        if doubled := [row for row in rows if row in written]:
            raise ValueError(f"{writer} writes row {doubled[0]} for the second time")
        written.update(rows)
        for task in self.tasks.values():
            if writer in task.waits:
                for row in rows:
                    task.write(row)

    def unwrite(self, writer: str, rows: Iterable[Row]) -> None:
        """Note that what was written for rows was lost, and may be written again."""
        for row in rows:
            self.written[writer].remove(row)
            for task in self.tasks.values():
                if writer in task.waits:
                    task.unwrite(row)

    def take(
        self, name: Any, holder: str, now: float, seconds: float, most: int,
        sampler: Sampler = FIRST_IN, ranks: int = 1, table: Any = None,
    ) -> Lease | None:  # fmt: skip
        """Lease rows that are ready for a task, or None.

        Args:
            name: the task.
            holder: who takes them.
            now: the time in seconds, on whatever clock.
            seconds: how long the holder keeps them without renewing.
            most: rows at most; a task of whole groups gets one group at least.
            sampler: which of the rows that are ready.
            ranks: the processes that share them.
            table: where to take from; None is the first table that has any.
        """
        task = self.tasks[name]
        if table is None:
            table = min(task.ready, default=None)
        return self.lease(name, task.take(table, most, ranks, sampler, self.facts), holder, now, seconds)

    def lease(
        self, name: Any, rows: Sequence[Row], holder: str, now: float, seconds: float, number: int | None = None
    ) -> Lease | None:
        """Lease these rows, all of which must be ready, as `Leases.take` does; None where there are none."""
        if not rows:
            return None
        lease = self.leases.take(name, holder, rows, now, seconds, number)
        self.tasks[name].hold(rows, lease.number)
        return lease

    def acknowledge(self, number: int, now: float) -> Lease:
        """End a lease whose rows are done. Raises LeaseLost if it has expired or was given up."""
        self.leases.current(number, now)
        lease = self.leases.end(number)
        for row in lease.rows:
            self.tasks[lease.task].finish(row)
        return lease

    def give_up(self, leases: Iterable[Lease]) -> list[Lease]:
        """End leases whose rows are not done and free again; those."""
        ended = [self.leases.end(lease.number) for lease in list(leases)]
        for lease in ended:
            for row in lease.rows:
                self.tasks[lease.task].give_back(row)
        return ended

    def skip(self, name: Any, rows: Iterable[Row]) -> None:
        """Note that a task leaves rows out: it is done with them without taking them."""
        for row in rows:
            self.tasks[name].finish(row)

    def move(self, name: Any, rows: Iterable[Row], table: Any) -> None:
        """Put rows of one task into another table."""
        for row in rows:
            self.tasks[name].move(row, table)

    def forget(self, rows: Iterable[Row]) -> list[Lease]:
        """Let rows leave; leases that hold any of them are given up, with their other rows free again."""
        gone = [row for row in rows if row in self.rows]
        held = {number for task in self.tasks.values() for row in gone if (number := task.lease.get(row)) is not None}
        lost = self.give_up(self.leases.held[number] for number in sorted(held))
        for row in gone:
            del self.rows[row]
            for task in self.tasks.values():
                task.forget(row)
            for written in self.written.values():
                written.discard(row)
        return lost

"""The tasks of a queue: for each what is ready, who holds what, and what is done. Rows are any names; time is an argument.

write ──▶ the writers that the task waits for ──none left──▶ ready ──take──▶ lease ──acknowledge──▶ done
  ◀── unwrite: a column was lost                               ▲              │                      │
                                                               └── give back ─┴─────── reopen ───────┘
                                              a lease is given back when it expires, its holder is gone, or one of its rows left

What is ready is kept up as it changes and never searched for: one row costs the logarithm of the rows in work.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from braidrl.queue.samplers import FIRST_IN, Candidate, Sampler, checked
from braidrl.queue.table import Row

PATIENCE = 8
"""How often a sampler may pass over the oldest row that it is shown before that row is given anyway."""


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

    def count(self, holder: str) -> int:
        """Return how many leases a holder has."""
        return len(self.by_holder.get(holder, ()))

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


class Ordered:
    """A set that gives its first members by number; adding or giving one costs the logarithm of its size."""

    def __init__(self) -> None:
        self._numbers: dict[Row, int] = {}
        self._heap: list[tuple[int, Row]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, member: object) -> bool:
        return member in self._numbers

    def add(self, member: Row, number: int) -> None:
        """Add a member under a number that no other member has."""
        self._numbers[member] = number
        heappush(self._heap, (number, member))

    def discard(self, member: Row) -> None:
        """Remove a member if it is there."""
        self._numbers.pop(member, None)

    def first(self, most: int) -> list[Row]:
        """Return up to `most` members with the lowest numbers, which stay in the set."""
        found: dict[Row, int] = {}
        while self._heap and len(found) < most:
            number, member = heappop(self._heap)
            # What was discarded, or added again, is still in the heap.
            if self._numbers.get(member) == number:
                found[member] = number
        for member, number in found.items():
            heappush(self._heap, (number, member))
        return list(found)


class Task:
    """The rows of one consumer. It takes from one table at a time, and whole groups at once where it is told so."""

    def __init__(self, waits: Iterable[str], whole_groups: bool = False) -> None:
        self.waits, self.whole_groups = frozenset(waits), whole_groups
        self.numbers: dict[Row, int] = {}
        self.table: dict[Row, Any] = {}
        self.group: dict[Row, Any] = {}
        self.missing: dict[Row, int] = {}
        """How many of the awaited writers have not written a row; a row that they all have written is not in it."""
        self.lease: dict[Row, int | None] = {}
        """The number of the lease that holds a row; None once the task is done with it."""
        self.ready: dict[Any, Ordered] = {}
        """For each table the rows that can be taken; where whole groups are, the first row of each complete group."""
        self.undone: Counter[Any] = Counter()
        """For each table the rows that the task is not done with."""
        self._groups: defaultdict[Any, dict[Row, bool]] = defaultdict(dict)
        """For each group its rows and which of them are ready."""
        self._passed: Counter[Any] = Counter()

    def admit(self, row: Row, number: int, group: Any, table: Any) -> None:
        """Let a row be born that nobody has written."""
        self.numbers[row], self.table[row], self.missing[row], self.group[row] = number, table, len(self.waits), group
        self.undone[table] += 1
        if self.whole_groups:
            self._withdraw(row)
            self._groups[group][row] = False
        if not self.waits:
            self.missing[row] = 1
            self.write(row)

    def write(self, row: Row) -> None:
        """Note that one more of the awaited writers has written a row."""
        self.missing[row] -= 1
        if not self.missing[row]:
            del self.missing[row]
            if row not in self.lease:
                self._enter(row)

    def unwrite(self, row: Row) -> None:
        """Note that what one of the awaited writers wrote was lost. Who holds the row keeps it."""
        if row not in self.missing and row not in self.lease:
            self._withdraw(row)
        self.missing[row] = self.missing.get(row, 0) + 1

    def finish(self, row: Row) -> None:
        """Note that the task is done with a row, which it may have left out without taking it."""
        if row not in self.lease:
            self._withdraw(row)
        self.lease[row] = None
        self.undone[self.table[row]] -= 1

    def give_back(self, row: Row) -> None:
        """Make a row that was held free again."""
        del self.lease[row]
        if row not in self.missing:
            self._enter(row)

    def reopen(self, row: Row) -> None:
        """Let a row that is done be done again: what the task wrote for it was lost."""
        self.undone[self.table[row]] += 1
        self.give_back(row)

    def move(self, row: Row, table: Any) -> None:
        """Put a row into another table; one that is done stays done there."""
        done = row in self.lease and self.lease[row] is None
        self.undone[self.table[row]] -= not done
        self.undone[table] += not done
        is_ready = row not in self.missing and row not in self.lease
        if is_ready:
            self._withdraw(row)
        self.table[row] = table
        if is_ready:
            self._enter(row)

    def forget(self, row: Row) -> None:
        """Let a row leave."""
        if self.lease.get(row, 0) is not None:
            self.undone[self.table[row]] -= 1
        if not self.undone[self.table[row]]:
            del self.undone[self.table[row]]
        self._withdraw(row)
        if self.whole_groups:
            rows = self._groups[self.group[row]]
            del rows[row]
            if not rows:
                del self._groups[self.group[row]]
            elif all(rows.values()):
                self._add(next(iter(rows)))
        for known in (self.numbers, self.table, self.missing, self.lease, self.group):
            known.pop(row, None)

    def take(self, table: Any, most: int, ranks: int, sampler: Sampler, facts: Callable[[Row], Candidate]) -> list[Row]:
        """Return the rows of a table that the sampler chooses: up to `most`, or where whole groups are taken at least one group."""
        ready = self.ready.get(table)
        if not ready:
            return []
        if self.whole_groups:
            most = max(1, most // len(self._groups[self.group[ready.first(1)[0]]]))
        rows = ready.first(most * sampler.looks_at)
        if sampler is not FIRST_IN:
            chosen = checked(sampler, [self._described(row, facts) for row in rows], most, ranks)
            self._passed[table] = 0 if 0 in chosen else self._passed[table] + 1
            if self._passed[table] >= PATIENCE:
                chosen, self._passed[table] = [0, *chosen[: most - 1]], 0
            rows = [rows[place] for place in sorted(chosen)]
        return [row for first in rows for row in self._groups[self.group[first]]] if self.whole_groups else rows

    def hold(self, rows: Iterable[Row], number: int) -> None:
        """Note the lease that holds some rows. Raises ValueError where one is not ready."""
        for row in rows:
            if row in self.lease or row in self.missing:
                raise ValueError(f"row {row} is given for the second time, or before it is ready")
            self._withdraw(row)
            self.lease[row] = number

    def is_ready(self, table: Any, rows: int) -> bool:
        """Return whether so many rows of a table can be taken; not for tasks that take whole groups."""
        return len(self.ready.get(table, ())) == rows

    def _enter(self, row: Row) -> None:
        if not self.whole_groups:
            self._add(row)
            return
        rows = self._groups[self.group[row]]
        rows[row] = True
        if all(rows.values()):
            self._add(next(iter(rows)))

    def _described(self, row: Row, facts: Callable[[Row], Candidate]) -> Candidate:
        if not self.whole_groups:
            return facts(row)
        return facts(row)._replace(tokens=sum(facts(one).tokens for one in self._groups[self.group[row]]))

    def _add(self, row: Row) -> None:
        self.ready.setdefault(self.table[row], Ordered()).add(row, self.numbers[row])

    def _withdraw(self, row: Row) -> None:
        """Take a row out of what is ready; with it the whole group where groups are taken."""
        named = row
        if self.whole_groups and (rows := self._groups.get(self.group[row])):
            named = next(iter(rows))
            if row in rows:
                rows[row] = False
        ready = self.ready.get(self.table[named])
        if ready is not None:
            ready.discard(named)
            if not ready:
                del self.ready[self.table[named]]


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

    def reopen(self, name: Any, rows: Iterable[Row]) -> None:
        """Let those rows be done again that a task is done with: what it made of them was lost."""
        task = self.tasks[name]
        for row in rows:
            if row in task.lease and task.lease[row] is None:
                task.reopen(row)

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

"""The tasks of a queue: for each the ready rows, leases and completed rows. Any names serve as rows; time is an
argument.

write ──▶ the writers that the task waits for ──none left──▶ ready ──take──▶ lease ──complete──▶ done
  ◀── unwrite: a column was lost                               ▲              │                    │
                                                               └── give back ─┴────── reopen ──────┘
                                      a lease is given back when it expires, its holder has ended, or one of its rows is
                                      removed

A lease covers all rows of one take; its rows may be completed in parts. Ready rows are indexed, never searched for.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from braidrl.queue.samplers import FIRST_IN, Candidate, Sampler, checked
from braidrl.queue.table import Lease, Leases, Positions, Row, StoredRows

PATIENCE = 8
"""Number of times that a sampler may skip the oldest row it sees; then that row is leased."""


class Ordered:
    """A priority queue of rows by number; adding or removing a row takes logarithmic time."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self._heap: list[int] = []

    def add(self, rows: Iterable[Row], numbers: Mapping[Row, int]) -> None:
        """Add rows."""
        new = {numbers[row]: row for row in rows}
        self.rows.update(new)
        if not self._heap:
            # A sorted list is a heap.
            self._heap = sorted(new)
            return
        for number in new:
            heappush(self._heap, number)

    def take(self, most: int) -> list[Row]:
        """Remove and return up to `most` rows with the lowest numbers."""
        rows: list[Row] = []
        while self._heap and len(rows) < most:
            # Removed rows, and those added twice, are still in the heap.
            row = self.rows.pop(heappop(self._heap), None)
            if row is not None:
                rows.append(row)
        return rows

    def first(self, most: int, numbers: Mapping[Row, int]) -> list[Row]:
        """Return up to `most` rows with the lowest numbers, without removing them."""
        rows = self.take(most)
        self.add(rows, numbers)
        return rows


class Task:
    """The rows of one consumer, which takes from one table at a time, and whole groups if configured.

    A row is ready when every awaited writer has written it and no lease holds it. All methods take many rows at once,
    so that the cost per row is that of the interpreter's dictionaries and sets.
    """

    def __init__(
        self,
        waits: Iterable[str],
        whole_groups: bool,
        numbers: Mapping[Row, int],
        group: Mapping[Row, Any],
        written: Mapping[str, set[Row]],
    ) -> None:
        """Start without rows; `numbers`, `group` and `written` are shared by all tasks of a queue."""
        self.waits, self.whole_groups = frozenset(waits), whole_groups
        self.numbers, self.group = numbers, group
        self._written = [written[writer] for writer in self.waits]
        self.table: dict[Row, Any] = {}
        self.lease: dict[Row, int | None] = {}
        """The lease number of a row; None once it is completed."""
        self.ready: dict[Any, Ordered] = {}
        """Ready rows by table; with whole groups, the first row of each complete group."""
        self.undone: Counter[Any] = Counter()
        """Rows by table that are not completed."""
        self._groups: dict[Any, dict[Row, bool]] = {}
        """The rows of each group, and the ready ones among them."""
        self._passed: Counter[Any] = Counter()

    def admit(self, rows: Sequence[Row], table: Any) -> None:
        """Admit rows without any columns."""
        self.table.update(dict.fromkeys(rows, table))
        self.undone[table] += len(rows)
        if self.whole_groups:
            self.withdraw(rows)
            for row in rows:
                self._groups.setdefault(self.group[row], {})[row] = False
        self._enter(self._complete(rows))

    def write(self, rows: Sequence[Row]) -> None:
        """Record that one of the awaited writers has written rows."""
        admitted = rows if self.table.keys() >= set(rows) else [row for row in rows if row in self.table]
        self._enter(self._free(self._complete(admitted)))

    def unwrite(self, rows: Sequence[Row]) -> None:
        """Record the loss of an awaited writer's columns. Leases on the rows remain."""
        self.withdraw(self._free([row for row in rows if row in self.table]))

    def finish(self, rows: Sequence[Row]) -> None:
        """Record completed rows; a task may also skip rows without taking them."""
        self.withdraw(self._free(rows))
        self.lease.update(dict.fromkeys(rows))
        self._count(rows, -1)

    def give_back(self, rows: Sequence[Row]) -> None:
        """Make leased rows available again."""
        for row in rows:
            del self.lease[row]
        self._enter(self._complete(rows))

    def reopen(self, rows: Iterable[Row]) -> None:
        """Reopen completed rows among these, whose results for the task were lost."""
        done = [row for row in rows if self.lease.get(row, 0) is None]
        self._count(done, 1)
        self.give_back(done)

    def move(self, rows: Iterable[Row], table: Any) -> None:
        """Move admitted rows to another table; completed rows stay completed."""
        rows = [row for row in rows if self.table.get(row, table) != table]
        left = [row for row in rows if self.lease.get(row, 0) is not None]
        self._count(left, -1)
        self.undone[table] += len(left)
        ready = self._free(self._complete(rows))
        self.withdraw(ready)
        self.table.update(dict.fromkeys(rows, table))
        self._enter(ready)

    def forget(self, rows: Sequence[Row]) -> None:
        """Remove rows."""
        rows = rows if self.table.keys() >= set(rows) else [row for row in rows if row in self.table]
        if len(rows) == len(self.table):
            # Fast path: the last batch leaves the task empty.
            for by_row in (self.table, self.lease, self.ready, self.undone, self._groups):
                by_row.clear()
            return
        left = [row for row in rows if self.lease.get(row, 0) is not None]
        self._count(left, -1)
        self.withdraw(rows if left else ())
        for row in rows if self.whole_groups else ():
            members = self._groups[self.group[row]]
            del members[row]
            if not members:
                del self._groups[self.group[row]]
            elif all(members.values()):
                self._enter([next(iter(members))])
        tables = {self.table.pop(row) for row in rows}
        for row in rows:
            self.lease.pop(row, None)
        for table in tables:
            if not self.undone[table]:
                del self.undone[table]

    def take(self, table: Any, most: int, ranks: int, sampler: Sampler, facts: Callable[[Row], Candidate]) -> list[Row]:
        """Return the rows of a table that the sampler chooses: up to `most`, or with whole groups at least one group.

        They are no longer ready, so the caller must lease them immediately.
        """
        ready = self.ready.get(table)
        if ready is None:
            return []
        if self.whole_groups:
            most = max(1, most // len(self._groups[self.group[ready.first(1, self.numbers)[0]]]))
        if sampler is FIRST_IN:
            rows = ready.take(most)
            if not ready.rows:
                del self.ready[table]
        else:
            rows = ready.first(most * sampler.looks_at, self.numbers)
            candidates = [facts(row) for row in rows]
            if self.whole_groups:
                sums = [sum(facts(member).tokens for member in self._groups[self.group[row]]) for row in rows]
                candidates = [
                    candidate._replace(tokens=tokens) for candidate, tokens in zip(candidates, sums, strict=True)
                ]
            chosen = checked(sampler, candidates, most, ranks)
            self._passed[table] = 0 if 0 in chosen else self._passed[table] + 1
            if self._passed[table] >= PATIENCE:
                chosen, self._passed[table] = [0, *chosen[: most - 1]], 0
            rows = [rows[position] for position in sorted(chosen)]
        if self.whole_groups:
            rows = [row for first in rows for row in self._groups[self.group[first]]]
        if self.whole_groups or sampler is not FIRST_IN:
            self.withdraw(rows)
        return rows

    def are_free(self, rows: Sequence[Row]) -> bool:
        """Return True if all of these rows, which are in work, can be taken."""
        return self.lease.keys().isdisjoint(rows) and all(written.issuperset(rows) for written in self._written)

    def _count(self, rows: Sequence[Row], change: int) -> None:
        """Change the numbers of uncompleted rows, by `change` for each of these rows."""
        for table, some in by_value(rows, self.table):
            self.undone[table] += change * len(some)

    def _free(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return those rows that no lease holds and that are not completed."""
        return rows if self.lease.keys().isdisjoint(rows) else [row for row in rows if row not in self.lease]

    def _complete(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that all awaited writers have written."""
        for written in self._written:
            if not written.issuperset(rows):
                rows = [row for row in rows if row in written]
        return rows

    def _enter(self, rows: Sequence[Row]) -> None:
        """Make rows ready; with whole groups, the groups that they complete."""
        if self.whole_groups:
            groups = dict.fromkeys(self.group[row] for row in rows)
            for row in rows:
                self._groups[self.group[row]][row] = True
            members = (self._groups[group] for group in groups)
            rows = [next(iter(complete)) for complete in members if all(complete.values())]
        for table, some in by_value(rows, self.table):
            self.ready.setdefault(table, Ordered()).add(some, self.numbers)

    def withdraw(self, rows: Sequence[Row]) -> None:
        """Remove rows from the ready ones; with whole groups, their groups too."""
        if self.whole_groups:
            named: dict[Row, None] = {}
            for row in rows:
                if members := self._groups.get(self.group[row]):
                    named[next(iter(members))] = None
                    if row in members:
                        members[row] = False
            rows = list(named)
        if not self.ready or not rows:
            return
        for table, rows_of_table in by_value(rows, self.table):
            if (ready := self.ready.get(table)) is not None:
                for row in rows_of_table:
                    ready.rows.pop(self.numbers[row], None)
                if not ready.rows:
                    del self.ready[table]


def by_value(rows: Sequence[Row], values: Mapping[Row, Any]) -> Iterable[tuple[Any, Sequence[Row]]]:
    """Group rows by their value; usually all have the same one."""
    distinct = set(map(values.__getitem__, rows))
    if len(distinct) <= 1:
        return [(value, rows) for value in distinct]
    return [(value, [row for row in rows if values[row] == value]) for value in distinct]


class Tasks:
    """All tasks of a queue and the rows in work.

    A writer is a column, or a name for several columns written together.
    """

    def __init__(self, waits: Mapping[Any, Iterable[str]], whole_groups: Collection[Any] = ()) -> None:
        """Make a task for each key of `waits`; the values are the writers that it waits for."""
        self.leases = Leases()
        self.rows: dict[Row, int] = {}
        """The admission number of each row in work."""
        self.group: dict[Row, Any] = {}
        self.written: defaultdict[str, set[Row]] = defaultdict(set)
        self.tasks = {
            name: Task(writers, name in whole_groups, self.rows, self.group, self.written)
            for name, writers in waits.items()
        }
        self.facts: Callable[[Row], Candidate] = lambda row: Candidate(row)
        self._admitted = count()

    def __getitem__(self, name: Any) -> Task:
        """Return a task."""
        return self.tasks[name]

    def admit(
        self, rows: Iterable[Row], group: Callable[[Row], Any], table: Any = 0, names: Iterable[Any] | None = None
    ) -> None:
        """Admit rows to a table of all tasks, or of the named ones; they may enter others later.

        Raises ValueError for a row that is in work already.
        """
        rows = list(rows)
        if not self.rows.keys().isdisjoint(rows):
            raise ValueError(f"row {next(row for row in rows if row in self.rows)} is admitted twice")
        self.rows.update(zip(rows, self._admitted, strict=False))
        if len(set(rows)) < len(rows):
            raise ValueError(f"a row of {rows[:4]} is admitted twice")
        self.group.update(zip(rows, map(group, rows), strict=True))
        for name in self.tasks if names is None else names:
            self.tasks[name].admit(rows, table)

    def write(self, writer: str, rows: Sequence[Row]) -> None:
        """Record written rows. Raises ValueError for a second write: columns are immutable."""
        written = self.written[writer]
        if not written.isdisjoint(rows):
            doubled = next(row for row in rows if row in written)
            raise ValueError(f"{writer} writes row {doubled} for the second time")
        written.update(rows)
        for task in self.tasks.values():
            if writer in task.waits:
                task.write(rows)

    def unwrite(self, writer: str, rows: Sequence[Row]) -> None:
        """Record the loss of written columns, which may be written again."""
        for row in rows:
            self.written[writer].remove(row)
        for task in self.tasks.values():
            if writer in task.waits:
                task.unwrite(rows)

    def take(
        self,
        name: Any,
        holder: str,
        now: float,
        seconds: float,
        most: int,
        sampler: Sampler = FIRST_IN,
        ranks: int = 1,
        table: Any = None,
    ) -> Lease | None:
        """Lease ready rows for a task, or return None.

        Args:
            name: Name of the task.
            holder: Takes the rows.
            now: Time in seconds, on any clock.
            seconds: Duration of the lease without renewal.
            most: Limit of rows; a task of whole groups gets at least one group.
            sampler: Chooses among ready rows.
            ranks: Processes that share the rows.
            table: Table to take from; None is the first with ready rows.
        """
        task = self.tasks[name]
        if table is None:
            table = min(task.ready, default=None)
        return self._lease(name, task.take(table, most, ranks, sampler, self.facts), holder, now, seconds)

    def lease(self, name: Any, rows: Sequence[Row], holder: str, now: float, seconds: float) -> Lease | None:
        """Lease these rows, or return None without rows.

        Raises ValueError if a row is already leased, or lacks a column.
        """
        if not self.tasks[name].are_free(rows):
            raise ValueError(f"a row of {list(rows)[:4]} is leased twice, or before it is ready")
        self.tasks[name].withdraw(rows)
        return self._lease(name, rows, holder, now, seconds)

    def _lease(self, name: Any, rows: Sequence[Row], holder: str, now: float, seconds: float) -> Lease | None:
        if not rows:
            return None
        lease = self.leases.take(name, holder, rows, now, seconds)
        self.tasks[name].lease.update(dict.fromkeys(rows, lease.number))
        return lease

    def complete(self, lease: Lease, positions: Sequence[int] | None = None) -> list[Row]:
        """Complete rows of a lease, at some positions or all; return those that the lease still held."""
        rows = self.left(lease, positions)
        self.finish(lease, rows)
        return rows

    def finish(self, lease: Lease, rows: Sequence[Row]) -> None:
        """Complete rows that a lease holds."""
        if rows:
            self.leases.shrink(lease, len(rows))
            self.tasks[lease.task].finish(rows)

    def rows_by_lease(
        self, done: Positions, parts: Sequence[tuple[StoredRows, Positions]], now: float
    ) -> tuple[list[int], dict[Lease, list[Row]]]:
        """Return the lost leases among those of `done`, and for the others the rows at its positions.

        The parts written for rows get the names of the rows, except those of lost leases.
        """
        lost, rows_by_lease = list[int](), dict[Lease, list[Row]]()
        leases = {number: lease for number, _ in done if (lease := self.leases.held.get(number)) is not None}
        for number, positions in done:
            if number not in leases or leases[number].deadline < now:
                lost.append(number)
            else:
                rows_by_lease.setdefault(leases[number], []).extend(self.left(leases[number], positions))
        chosen = {row for rows in rows_by_lease.values() for row in rows}
        for part, written in parts:
            named: list[Row] = []
            for number, positions in written:
                # Rows of lost leases get no name, but keep their position in the part.
                rows = leases[number].rows if number in leases else None
                named += [rows and rows[position] for position in positions or ()]
            part.rows = dict(zip(named, range(len(named)), strict=True))
            if not chosen.issuperset(named):
                part.rows = {row: position for row, position in part.rows.items() if row in chosen}
        return lost, rows_by_lease

    def left(self, lease: Lease, positions: Sequence[int] | None = None) -> list[Row]:
        """Return the rows of a lease that are not completed, or those at some positions."""
        rows = list(lease.rows) if positions is None else [lease.rows[position] for position in positions]
        if lease.left == len(lease.rows):
            return rows
        lease_of = self.tasks[lease.task].lease
        return [row for row in rows if lease_of.get(row) == lease.number]

    def give_up(self, leases: Iterable[Lease]) -> list[Lease]:
        """End leases; their remaining rows are available again."""
        ended = list(leases)
        for lease in ended:
            self.release(lease, self.left(lease))
        return ended

    def release(self, lease: Lease, rows: Sequence[Row]) -> None:
        """Remove rows from a lease; they are available again."""
        self.leases.shrink(lease, len(rows))
        self.tasks[lease.task].give_back(rows)

    def forget(self, rows: Iterable[Row]) -> dict[Lease, list[Row]]:
        """Remove rows; leases keep their remaining rows. Return the rows lost, by lease."""
        removed = [row for row in dict.fromkeys(rows) if row in self.rows]
        lost: dict[Lease, list[Row]] = {}
        for task in self.tasks.values():
            for row in removed if task.lease and self.leases.held else ():
                if (number := task.lease.get(row)) is not None:
                    lost.setdefault(self.leases.held[number], []).append(row)
        for lease, some in lost.items():
            self.leases.shrink(lease, len(some))
        for task in self.tasks.values():
            task.forget(removed)
        for written in self.written.values():
            written.difference_update(removed)
        for row in removed:
            del self.rows[row], self.group[row]
        return lost

"""What one task can take, has taken and is done with. Rows are any names; no clock, no socket, no payload.

write ──▶ the writers that the task waits for ──none left──▶ ready ──take──▶ held ──finish──▶ done
  ◀── unwrite: a column was lost                               ▲              │                │
                                                               └── give back ─┴──── reopen ────┘

What is ready is kept up as it changes and never searched for: one row costs the logarithm of the rows in work.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from braidrl.transfer.queue.samplers import FIRST_IN, Candidate, Sampler, checked
from braidrl.transfer.queue.table import Row

PATIENCE = 8
"""How often a sampler may pass over the oldest row that it is shown before that row is given anyway."""


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
        shown = ready.first(most * sampler.looks_at)
        if sampler is FIRST_IN and not self.whole_groups:
            return shown
        chosen = checked(sampler, [self._described(row, facts) for row in shown], most, ranks)
        self._passed[table] = 0 if 0 in chosen else self._passed[table] + 1
        if self._passed[table] >= PATIENCE:
            chosen, self._passed[table] = [0, *chosen[: most - 1]], 0
        rows = [shown[place] for place in sorted(chosen)]
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

"""The rows of one consuming task in its controller, from the changes of storage units. No clock, no socket.

changes: admitted, written, left, lost ──▶ tasks: ready rows; table: locations of columns; done_by: the lease of each completed row
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from braidrl.queue.changes import admitted, grouped_rows, part_of, written
from braidrl.queue.samplers import Candidate
from braidrl.queue.table import Block, Row, Table, row_name
from braidrl.queue.tasks import Tasks


class TaskRows:
    """All rows in work, in tables (the name given by a put, the number of the row's unit)."""

    def __init__(self, name: str, columns: Collection[str]) -> None:
        """Begin without rows for a task that waits for these columns."""
        self.name, self.columns = name, frozenset(columns)
        self.tasks, self.table = Tasks({name: self.columns}), Table()
        self.task = self.tasks.tasks[name]
        self.tasks.facts = self._facts
        self.group_rows: Counter[Any] = Counter()
        self.tokens: dict[Row, int] = {}
        self.done_by: dict[Row, int] = {}
        """The lease of each completed row in work."""

    def admit(self, number: int, rows: Sequence[Row], change: Mapping[str, Any]) -> None:
        """Admit those rows of a unit that are new."""
        groups = {}
        for row, group, tokens in grouped_rows(rows, change):
            if tokens:
                self.tokens[row] = tokens
            if row not in self.tasks.rows:
                groups[row] = group
        self.group_rows.update(groups.values())
        # The rows of a lease belong to one unit, which receives a single report.
        self.tasks.admit(groups, groups.__getitem__, (row_name(change["table"]), number))

    def write(self, number: int, change: Mapping[str, Any]) -> None:
        """Record columns of rows of a unit."""
        part = part_of(change)
        if "table" in change:
            self.admit(number, list(part.rows), change)
        known = self.table.parts.get(part.columns[0], {})
        part.rows = {row: place for row, place in part.rows.items() if row in self.tasks.rows and row not in known}
        if part.rows:
            rows = list(part.rows)
            self.table.add(part, part.columns)
            for column in part.columns:
                if column in self.columns:
                    self.tasks.write(column, rows)

    def leave(self, rows: Sequence[Row]) -> list[Block]:
        """Remove rows; return the blocks that are now free."""
        gone = [row for row in rows if row in self.tasks.rows]
        groups = [self.task.group[row] for row in gone]
        freed = self.table.evict(gone)
        self.tasks.forget(gone)
        for row, group in zip(gone, groups, strict=True):
            self.group_rows[group] -= 1
            if not self.group_rows[group]:
                del self.group_rows[group]
            self.tokens.pop(row, None)
            self.done_by.pop(row, None)
        return freed

    def lose(self, rows: Iterable[Row], columns: Sequence[str], by: str) -> None:
        """Record lost columns; this task repeats the rows for which it wrote them."""
        for row in rows:
            for column in columns:
                if self.table.parts.get(column, {}).pop(row, None) is not None and column in self.columns:
                    self.tasks.unwrite(column, [row])
            if by == self.name and self.done_by.pop(row, None) is not None:
                self.task.reopen([row])

    def learn_done(self, row: Row, lease: int) -> None:
        """Record that the task had completed a row before this controller started."""
        if row in self.tasks.rows and row not in self.done_by:
            held = self.task.lease.get(row)
            if held is not None:
                self.tasks.give_up([self.tasks.leases.held[held]])
            self.tasks.skip(self.name, [row])
            self.done_by[row] = lease

    def compare(self, number: int, changes: Sequence[Mapping[str, Any]]) -> None:
        """Remove rows of an earlier life of a unit that the unit no longer has."""
        there: dict[str, set[Row]] = {}
        for change in changes:
            for name in change.get("columns", ("",)):
                there.setdefault(name, set()).update(map(row_name, change["rows"]))
        own = self._rows_of(number)
        self.leave([row for row in own if row not in there.get("", ())])
        for column, parts in self.table.parts.items():
            lost = [row for row in parts if row not in there.get(column, ()) and self.task.table[row][1] == number]
            for row in lost:
                self.lose([row], [column], parts[row].writer)

    def place(self, table: Any) -> tuple[Any, int] | None:
        """Return a table, by default the first with ready rows, and the unit of its oldest ready row."""
        first = min((place[0] for place in self.task.ready), default=None) if table is None else table
        places = [place for place in self.task.ready if place[0] == first]
        return min(
            places,
            key=lambda place: self.task.numbers[self.task.ready[place].first(1, self.task.numbers)[0]],
            default=None,
        )

    def of_unit(self, number: int) -> tuple[list[dict[str, Any]], list[tuple[int, Row]]]:
        """Return all that is known of a unit as changes, and its completed rows, each after its lease."""
        rows = self._rows_of(number)
        mine, tables = set(rows), dict[Any, list[Row]]()
        for row in rows:
            tables.setdefault(self.task.table[row][0], []).append(row)
        changes = [
            admitted(table, many, [self.task.group[row] for row in many], [self.tokens.get(row, 0) for row in many])
            for table, many in tables.items()
        ]
        parts = {part: None for parts in self.table.parts.values() for row, part in parts.items() if row in mine}
        return [*changes, *map(written, parts)], [(lease, row) for row, lease in self.done_by.items() if row in mine]

    def _rows_of(self, number: int) -> list[Row]:
        return [row for row in self.tasks.rows if self.task.table[row][1] == number]

    def are_free(self, rows: Iterable[Row]) -> bool:
        """Return True if all of these rows can be taken."""
        rows = list(rows)
        return self.tasks.rows.keys() >= set(rows) and self.task.are_free(rows)

    def _facts(self, row: Row) -> Candidate:
        group = self.task.group[row]
        return Candidate(row, group, self.group_rows[group], self.tokens.get(row, 0))

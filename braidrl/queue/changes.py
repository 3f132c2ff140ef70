"""The log of changes from storage units to controllers. A change is final once every controller has read it.

unit ──note──▶ log: change, change, ... ──after(number of changes read)──▶ controller
                └── is_heard(block)? then the put is answered; blocks of removed rows are free
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from braidrl.data.rows import Rows
from braidrl.queue.table import Block, Row, StoredPart, row_name

CLOSED = 4096
"""Number of completed leases to remember, for repeated requests."""
GONE = 16_384
"""Number of freed blocks to remember, for repeated puts."""


class ChangeLog:
    """The changes that some controller has not read yet, and the actions that wait for all of them."""

    def __init__(self, tasks: Collection[str]) -> None:
        self.first = self.next = 0
        """Numbers of the first kept change, and of the next one."""
        self.heard: dict[str, int] = dict.fromkeys(tasks, -1)
        """Number of changes that each task's controller has read; -1 before its first request."""
        self._changes: deque[dict[str, Any]] = deque()
        self._noted: dict[str, int] = {}
        self._leaving: deque[tuple[int, list[Block]]] = deque()
        self.gone: dict[str, None] = {}
        """Names of the last blocks whose rows were removed, also before a restart: a repeated put does not restore its rows."""

    def note(self, change: dict[str, Any], name: str = "", leaving: Sequence[Block] = ()) -> None:
        """Add a change.

        Args:
            change: The change.
            name: A block or another name for `is_heard`.
            leaving: Blocks that are free after every controller has read it.
        """
        self._changes.append(change)
        self.next += 1
        if name:
            self._noted[name] = self.next
        if leaving:
            self._leaving.append((self.next, list(leaving)))

    def after(self, since: int) -> list[dict[str, Any]]:
        """Return the changes after the first `since`."""
        return [self._changes[place] for place in range(since - self.first, self.next - self.first)]

    def hear(self, task: str, since: int) -> list[Block]:
        """Record the number of changes that a controller has read; return the blocks that are now free."""
        self.heard[task], freed = max(since, self.heard[task]), list[Block]()
        while self.first < min(self.heard.values()):
            self._changes.popleft()
            self.first += 1
        while self._leaving and self._leaving[0][0] <= self.first:
            freed += self._leaving.popleft()[1]
        self.forget(freed)
        return freed

    def is_heard(self, *names: str) -> bool:
        """Return True if every controller has read all changes under these names."""
        least = min(self.heard.values(), default=self.next)
        return all(self._noted.get(name, 0) <= least for name in names)

    def knows(self, block: str) -> bool:
        """Return True if a block was added, also if it is gone."""
        return block in self._noted or block in self.gone

    def forget(self, blocks: Iterable[Block]) -> None:
        """Record that blocks are gone."""
        for block in blocks:
            self._noted.pop(block.name, None)
            remember(self.gone, block.name, GONE)

    @property
    def is_over(self) -> bool:
        """Return True if no block waits to be freed."""
        return not self._leaving

    def begin(self) -> None:
        """Forget all changes: controllers will receive the whole content."""
        self._changes.clear()
        self.first = self.next


def grouped_rows(rows: Sequence[Row], message: Mapping[str, Any]) -> Iterable[tuple[Row, Any, int]]:
    """Return each row with its group (by default itself) and its length (0 if unknown)."""
    groups = [row_name(group) for group in message["groups"]] if message["groups"] else rows
    return zip(rows, groups, message["lengths"] or [0] * len(rows), strict=True)


def admitted(table: Any, rows: Sequence[Row], groups: Sequence[Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the change for newly admitted rows of one table."""
    return {"kind": "born", "rows": rows, "table": table, "groups": groups, "lengths": lengths}


def remember(known: dict[Any, None], one: Any, most: int) -> None:
    """Remember a name; the oldest is forgotten beyond `most`."""
    known[one] = None
    if len(known) > most:
        del known[next(iter(known))]


def part_of(message: Mapping[str, Any]) -> StoredPart:
    """Return the written part in a put, a done or a change."""
    names = [row_name(row) for row in message["rows"]]
    rows = dict(zip(names, message["places"] or range(len(names)), strict=True))
    return StoredPart(
        message["by"], Rows({}), Block(*message["block"]), tuple(message["columns"]), message["size"], rows
    )  # fmt: skip


def written(part: StoredPart) -> dict[str, Any]:
    """Return a part in the form of a change."""
    rows, places = list(part.rows), list(part.rows.values())
    whole = places == list(range(part.size))
    return {
        "kind": "written", "rows": rows, "places": None if whole else places, "columns": part.columns,
        "block": part.block, "size": part.size, "by": part.writer,
    }  # fmt: skip

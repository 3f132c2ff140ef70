"""What storage units and controllers tell one another: changes, in the order of a log, which are facts once every controller has heard.

unit ──note──▶ log: change, change, ... ──after(what a controller has heard)──▶ controller
                └── is_heard(block)? then whoever put it is answered; left rows' blocks are free
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from braidrl.data.rows import Rows
from braidrl.queue.table import Block, Row, StoredPart, row_name

CLOSED = 4096
"""How many leases that are done are remembered, for clients that ask again."""
GONE = 16_384
"""How many blocks whose rows have left are remembered, for clients that repeat a put."""


class ChangeLog:
    """The changes that some controller has not heard yet, and what waits until all have."""

    def __init__(self, tasks: Collection[str]) -> None:
        self.first = self.next = 0
        """The number of the first change that is kept, and of the next one."""
        self.heard: dict[str, int] = dict.fromkeys(tasks, -1)
        """For each task how many changes its controller has heard; -1 before it has asked for any."""
        self._changes: deque[dict[str, Any]] = deque()
        self._noted: dict[str, int] = {}
        self._leaving: deque[tuple[int, list[Block]]] = deque()
        self.gone: dict[str, None] = {}
        """The names of the last blocks whose rows have left, of earlier lives too: a put that is repeated does not bring its rows back."""

    def note(self, change: dict[str, Any], name: str = "", leaving: Sequence[Block] = ()) -> None:
        """Add a change.

        Args:
            change: what happened.
            name: a block or anything else by which it is asked whether all have heard of it.
            leaving: blocks that nobody needs any more when all have heard of it.
        """
        self._changes.append(change)
        self.next += 1
        if name:
            self._noted[name] = self.next
        if leaving:
            self._leaving.append((self.next, list(leaving)))

    def after(self, since: int) -> list[dict[str, Any]]:
        """Return the changes that follow the first `since`."""
        return [self._changes[place] for place in range(since - self.first, self.next - self.first)]

    def hear(self, task: str, since: int) -> list[Block]:
        """Note how many changes a controller has heard; return the blocks that are free by this."""
        self.heard[task], freed = max(since, self.heard[task]), list[Block]()
        while self.first < min(self.heard.values()):
            self._changes.popleft()
            self.first += 1
        while self._leaving and self._leaving[0][0] <= self.first:
            freed += self._leaving.popleft()[1]
        self.forget(freed)
        return freed

    def is_heard(self, *names: str) -> bool:
        """Return whether every controller has heard of everything that was noted under these names."""
        least = min(self.heard.values(), default=self.next)
        return all(self._noted.get(name, 0) <= least for name in names)

    def knows(self, block: str) -> bool:
        """Return whether a block was noted, also if it is gone."""
        return block in self._noted or block in self.gone

    def forget(self, blocks: Iterable[Block]) -> None:
        """Note that blocks are gone."""
        for block in blocks:
            self._noted.pop(block.name, None)
            remember(self.gone, block.name, GONE)

    @property
    def is_over(self) -> bool:
        """Return whether no block waits to be freed."""
        return not self._leaving

    def begin(self) -> None:
        """Forget all changes: controllers will be told of everything that is here."""
        self._changes.clear()
        self.first = self.next


def grouped_rows(rows: Sequence[Row], message: Mapping[str, Any]) -> Iterable[tuple[Row, Any, int]]:
    """Return each row with its group, which is itself where none is named, and its length, 0 where that is not known."""
    groups = [row_name(group) for group in message["groups"]] if message["groups"] else rows
    return zip(rows, groups, message["lengths"] or [0] * len(rows), strict=True)


def born(table: Any, rows: Sequence[Row], groups: Sequence[Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Return rows of one table as a change says that they are born."""
    return {"kind": "born", "rows": rows, "table": table, "groups": groups, "lengths": lengths}


def remember(known: dict[Any, None], one: Any, most: int) -> None:
    """Add one to what is known; the oldest is forgotten where there are more than so many."""
    known[one] = None
    if len(known) > most:
        del known[next(iter(known))]


def part_of(message: Mapping[str, Any]) -> StoredPart:
    """Return what a put, a done or a change says was written."""
    names = [row_name(row) for row in message["rows"]]
    rows = dict(zip(names, message["places"] or range(len(names)), strict=True))
    return StoredPart(
        message["by"], Rows({}), Block(*message["block"]), tuple(message["columns"]), message["size"], rows
    )  # fmt: skip


def written(part: StoredPart) -> dict[str, Any]:
    """Return a part as a change says it."""
    rows, places = list(part.rows), list(part.rows.values())
    whole = places == list(range(part.size))
    return {
        "kind": "written", "rows": rows, "places": None if whole else places, "columns": part.columns,
        "block": part.block, "size": part.size, "by": part.writer,
    }  # fmt: skip

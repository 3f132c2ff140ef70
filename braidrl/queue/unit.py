"""A storage unit: knows the location of every column of its rows, and sends each task's controller every change.

client ──put──▶ unit ──follow: admitted, written, left, lost──▶ a controller for each task ──done──▶ unit
                  └── free: rows that every task has completed, and their memory

A change is final only when every controller has read it: until then its sender waits for the answer. So after the kill of any one
process, the others know everything that was answered. A restarted unit asks the controllers for its content.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from braidrl.data.frames import Frame
from braidrl.queue.calls import Server
from braidrl.queue.changes import CLOSED, GONE, ChangeLog, admitted, grouped_rows, part_of, remember, written
from braidrl.queue.requests import Answer, Wait, handler_of
from braidrl.queue.storage import DataPlane
from braidrl.queue.table import Block, Row, StoredPart, Table, row_name

HEARD, ROOM, RECOVERED = "heard", "room", "recovered"


@dataclass(slots=True)
class RowState:
    """A row in work: its table, its group, its length, and the lease of each task that has completed it."""

    table: Any
    group: Any
    tokens: int = 0
    done: dict[str, int] = field(default_factory=dict)


class StorageUnit:
    """The rows of one unit. Only its server's thread calls it."""

    def __init__(
        self, tasks: Collection[str], data: DataPlane, lease_s: float, budget_bytes: int | None, recovers: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin without rows.

        Args:
            tasks: Names of all tasks.
            data: Frees blocks that are no longer needed.
            lease_s: Seconds for which room is reserved for an announced put.
            budget_bytes: Limit of payload in this unit; None is no limit but memory.
            recovers: True for the replacement of a killed unit; it asks the controllers first.
            clock: Returns seconds.
        """
        self.tasks, self.data, self.lease_s, self.budget_bytes = tuple(tasks), data, lease_s, budget_bytes
        self.clock = clock
        self.rows: dict[Row, RowState] = {}
        self.table = Table()
        self.used_bytes = 0
        self.reserved: dict[str, tuple[int, float]] = {}
        """The reserved bytes of each holder that is about to put, and their deadline."""
        self.finished = False
        self.lost: dict[Row, list[str]] = {}
        """Columns with lost payload, which may be put again."""
        self.life = 1
        """Number of known starts; together with the number of a change it orders two views by age."""
        self.log = ChangeLog(self.tasks)
        self.closed: dict[str, dict[int, None]] = {task: {} for task in self.tasks}
        """The last completed leases by task, for clients that repeat a request."""
        self.held: dict[str, Mapping[str, Any]] | None = {} if recovers else None
        """Content reported by controllers, until all have reported."""
        self.server: Server

    def begin(self, server: Server) -> None:
        """Store the server, which wakes parked requests."""
        self.server = server

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request; during recovery all but controllers' requests wait."""
        if self.held is not None and request["request"] not in ("follow", "hold"):
            return Wait(RECOVERED, limited=False)
        return handler_of(self, request)(request, frames)

    # Requests of clients

    def on_reserve(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Reserve bytes for a put that follows."""
        now, size = self.clock(), request["bytes"]
        self.reserved = {name: kept for name, kept in self.reserved.items() if kept[1] > now}
        if self.budget_bytes is not None:
            if size > self.budget_bytes:
                raise ValueError(f"{size} bytes are put at once and the queue's budget is {self.budget_bytes}")
            if self.used_bytes + sum(kept for kept, _ in self.reserved.values()) + size > self.budget_bytes:
                return Wait(ROOM)
        self.reserved[request["holder"]] = size, now + self.lease_s
        return {}, ()

    def on_put(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Record columns of rows; the first column of a row admits it. A repeated put changes nothing.

        Refused with ValueError if a row has one of the columns already.
        """
        part = part_of(request)
        assert part.block is not None
        if not self._is_known(part):
            if any(row in self.table.parts.get(column, ()) for column in part.columns for row in part.rows):
                self.data.free([part.block])
                raise ValueError(
                    f"a row of {list(part.rows)[:4]} has one of the columns {', '.join(part.columns)} already"
                )
            self.reserved.pop(request["holder"], None)
            self._admit(part, request)
            self._store(part, {name: request[name] for name in ("table", "groups", "lengths")})
        return self._once_heard(part.block.name)

    def on_finish(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Record that no more rows will come."""
        if not self.finished:
            self.finished = True
            self._note({"kind": "finished"}, "finish")
        return self._once_heard("finish")

    def on_clear(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Remove rows, completed or not: the named ones, those of a table, or all."""
        chosen: Iterable[Row] = self.rows
        if request["rows"] is not None:
            chosen = [row for row in map(row_name, request["rows"]) if row in self.rows]
        elif request["table"] is not None:
            chosen = [row for row, state in self.rows.items() if state.table == request["table"]]
        if not request.get("parked"):
            self._leave(list(chosen))
        return self._once_heard("left")

    def on_missing(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Record blocks that a reader did not find: their columns are lost, and reported by name."""
        blocks = [Block(*block) for block in request["blocks"]]
        # Another node's server is not asked: it may be gone with the blocks.
        gone = self.data.missing(blocks) | {block.name for block in blocks if block.host != self.data.host}
        self._lose([part for part in self._parts() if part.block and part.block.name in gone])
        return self._once_heard("lost")

    def on_usage(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return bytes and rows in this unit, and the lost columns."""
        return {"bytes": self.used_bytes, "rows": len(self.rows), "lost": list(self.lost.items())}, ()

    # Requests of controllers

    def on_follow(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Return all changes that a controller has not read; if it knows another life of this unit, the whole content."""
        task, since = request["task"], request["since"]
        if self.held is not None:
            return Wait(RECOVERED, limited=False) if task in self.held else ({"tell": True}, ())
        if request["life"] != self.life:
            self.log.heard[task] = -1
            return {"life": self.life, "heard": self.log.next, **self._everything(task)}, ()
        self._free(self.log.hear(task, since))
        self.server.wake(HEARD)
        if since == self.log.next:
            return Wait(("follow", task), limited=False)
        return {"life": self.life, "heard": self.log.next, "changes": self.log.after(since)}, ()

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Record the leases of rows that a task has completed, and its new columns; rows that all tasks have completed are removed."""
        task, through = request["task"], []
        for message in request["parts"]:
            part = part_of(message)
            part.rows = {row: place for row, place in part.rows.items() if row in self.rows}
            if part.rows and not self._is_known(part):
                self._store(part)
            elif not part.rows and part.block is not None and not self._is_known(part):
                self.data.free([part.block])
        for number, rows in request["done"]:
            remember(self.closed[task], number, CLOSED)
            for row in map(row_name, rows):
                if (state := self.rows.get(row)) is not None:
                    state.done[task] = number
                    if len(state.done) == len(self.tasks):
                        through.append(row)
        self._leave(through)
        return self._once_heard("left", *(message["block"][2] for message in request["parts"]))

    def on_hold(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record a controller's report on earlier content; resume when all controllers have reported."""
        if self.held is not None:
            self.held[request["task"]] = request
            if len(self.held) == len(self.tasks):
                held, self.held = self.held, None
                self._recover(held)
                self.server.wake(RECOVERED)
        return {}, ()

    # Inside

    def _admit(self, part: StoredPart, message: Mapping[str, Any]) -> None:
        """Admit new rows; record lengths of all."""
        for row, group, tokens in grouped_rows(list(part.rows), message):
            if row not in self.rows:
                self.rows[row] = RowState(message["table"], group)
            if tokens:
                self.rows[row].tokens = tokens

    def _store(self, part: StoredPart, new: Mapping[str, Any] | None = None) -> None:
        """Record columns of some rows, under the name of each column, with the description of rows that may be new."""
        assert part.block is not None
        self.table.add(part, part.columns)
        self.used_bytes += part.block.size
        for row in part.rows if self.lost else ():
            self.lost[row] = [name for name in self.lost.pop(row, []) if name not in part.columns]
        self.lost = {row: names for row, names in self.lost.items() if names}
        self._note({**written(part), **(new or {})}, part.block.name)

    def _leave(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        freed = self.table.evict(rows)
        for row in rows:
            del self.rows[row]
            self.lost.pop(row, None)
        # If this unit is killed now, its replacement needs the blocks until it is notified again.
        self._note({"kind": "left", "rows": rows}, "left", freed)

    def _lose(self, parts: Sequence[StoredPart]) -> None:
        """Remove lost columns; a task repeats the rows for which it wrote them, others must be put again."""
        for part in parts:
            assert part.block is not None
            for column in part.columns:
                for row in part.rows:
                    del self.table.parts[column][row]
            for row in part.rows:
                if part.writer:
                    self.rows[row].done.pop(part.writer, None)
                else:
                    self.lost[row] = [*self.lost.get(row, []), *part.columns]
            self.used_bytes -= part.block.size
            self.log.forget([part.block])
            self._note({"kind": "lost", "rows": list(part.rows), "columns": part.columns, "by": part.writer}, "lost")

    def _note(self, change: dict[str, Any], name: str, leaving: Sequence[Block] = ()) -> None:
        """Add a change to the log, and notify the controllers."""
        self.log.note(change, name, leaving)
        for task in self.tasks:
            self.server.wake(("follow", task))

    def _once_heard(self, *names: str) -> Answer | Wait:
        """Answer when every controller has read the changes under these names."""
        return ({}, ()) if self.log.is_heard(*names) else Wait(HEARD, limited=False)

    def _free(self, blocks: Sequence[Block]) -> None:
        if blocks:
            self.used_bytes -= sum(block.size for block in blocks)
            self.data.free(blocks)
            self.server.wake(ROOM)

    def _is_known(self, part: StoredPart) -> bool:
        assert part.block is not None
        return self.log.knows(part.block.name)

    def _parts(self) -> list[StoredPart]:
        return list({part: None for parts in self.table.parts.values() for part in parts.values()})

    def _everything(self, task: str) -> dict[str, Any]:
        """Return the whole content for a controller that knows nothing of this unit."""
        done = [[state.done[task], row] for row, state in self.rows.items() if task in state.done]
        tables: dict[Any, list[Row]] = {}
        for row, state in self.rows.items():
            tables.setdefault(state.table, []).append(row)
        changes = [
            admitted(table, rows, [self.rows[row].group for row in rows], [self.rows[row].tokens for row in rows])
            for table, rows in tables.items()
        ]
        changes += map(written, self._parts())
        closed = list(self.closed[task])
        return {
            "all": True, "changes": changes, "done": done, "finished": self.finished, "closed": closed,
            "gone": list(self.log.gone),
        }  # fmt: skip

    def _recover(self, held: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the content of the most advanced controller, and each controller's completed rows.

        Columns without payload are reported as lost.
        """
        newest = max(held.values(), key=lambda told: (told["life"], told["heard"]))
        self.life = newest["life"] + 1
        self.finished = newest["finished"]
        for change in newest["changes"]:
            if change["kind"] == "born":
                for row, group, tokens in grouped_rows([row_name(row) for row in change["rows"]], change):
                    self.rows[row] = RowState(change["table"], group, tokens)
            else:
                self._store(part_of(change))
        for task, told in held.items():
            for number, row in told["done"]:
                if (state := self.rows.get(row_name(row))) is not None:
                    state.done[task] = number
            # Rows that are unconfirmed and no longer here are done.
            gone = [number for number, rows in told["closing"] if not self.rows.keys() & {*map(row_name, rows)}]
            for number in (*told["closed"], *gone):
                remember(self.closed[task], number, CLOSED)
            parts = [part_of(change) for change in told["changes"] if change["kind"] == "written"]
            blocks = [part.block for part in parts if part.block and not self._is_known(part)]
            self.data.free([*blocks, *(Block(*block) for block in told["freed"])])
        # Only now: a controller that has not read of a block's removal has it freed above.
        for name in chain.from_iterable(told["gone"] for told in held.values()):
            remember(self.log.gone, name, GONE)
        here = {part.block.name: part for part in self._parts() if part.block}
        self._lose([here[name] for name in self.data.missing([part.block for part in here.values() if part.block])])
        self._leave([row for row, state in self.rows.items() if len(state.done) == len(self.tasks)])
        self.log.begin()

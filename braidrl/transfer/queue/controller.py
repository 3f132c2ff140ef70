"""Controllers: who answers requests about rows. `Controller` knows holders and their leases; `QueueController` is a queue of columns.

put  ─▶ columns of rows, in any order, from anybody ─▶ rows that have all columns of a task are ready for it
take ─▶ rows under leases ─▶ done: written columns, and rows that every task is done with leave
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.frames import Frame
from braidrl.data.rows import Rows
from braidrl.transfer.queue.samplers import Candidate, Sampler
from braidrl.transfer.queue.storage import REQUESTS, Block, DataPlane, Place
from braidrl.transfer.queue.table import Row, StoredPart, Table, row_name
from braidrl.transfer.queue.tasks import Lease, LeaseLost, Tasks
from braidrl.transfer.queue.transport import Answer


@dataclass
class Holder:
    """A process that takes rows."""

    name: str
    address: str
    """Of its node's server."""
    heard: float = field(default_factory=time.monotonic)
    """When it last asked for anything."""


class Controller:
    """Answers requests by methods `on_<request>`. May be called by several threads: one lock guards all of it."""

    holders: Mapping[str, Any]

    def __init__(self, data: DataPlane, lease_s: float) -> None:
        """Begin without holders; a lease lasts `lease_s` seconds without a sign of life."""
        self.data, self.lease_s = data, lease_s
        self.stopping = False
        self.changes = 0
        """Counts what may interest whoever waits in this process."""
        self.changed = threading.Condition(threading.RLock())

    @property
    def queues(self) -> Collection[Tasks]:
        """Return the tasks of everything that this controller hands out."""
        raise NotImplementedError

    def advance(self) -> None:
        """Decide what can be decided now; called after every request that changes something."""
        self.changes += 1
        self.changed.notify_all()

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Answer one request; None lets its sender wait. Raises ValueError for a request that there is none of."""
        if request["request"] in REQUESTS:
            return self.data.answer(request)
        handler: Callable[..., Answer | None] | None = getattr(self, f"on_{request['request']}", None)
        if handler is None:
            raise ValueError(f"there is no request {request['request']!r}")
        with self.changed:
            if request.get("holder") in self.holders and not request.get("parked"):
                self.holders[request["holder"]].heard = time.monotonic()
            answer = handler(request, frames)
            if request["request"] != "take":
                self.advance()
        return answer

    def on_renew(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note that a holder is alive and slow: what it holds stays its own, but for what has run out already."""
        now = time.monotonic()
        self.tick()
        for tasks in self.queues:
            for lease in tasks.leases.of(request["holder"]):
                tasks.leases.renew(lease.number, now, max(self.lease_s, lease.deadline - now))
        return {"lost": self.lost(request["held"])}, ()

    def lost(self, held: Sequence[int]) -> list[int]:
        """Return those of the leases that are not held any more."""
        return [number for number in held if not any(number in tasks.leases.held for tasks in self.queues)]

    def silent(self, seconds: float) -> list[str]:
        """Return holders that have said nothing for so long: they hang, for one that works or waits speaks up now and then."""
        now = time.monotonic()
        with self.changed:
            return [name for name, holder in self.holders.items() if now - holder.heard > seconds]

    def tick(self) -> None:
        """Free what has been held for too long."""
        now = time.monotonic()
        with self.changed:
            for tasks in self.queues:
                tasks.give_up(tasks.leases.expired(now))

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until there are more changes than `seen`, or for so long; return how many there are."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != seen, seconds)
            return self.changes


class QueueController(Controller):
    """A queue of rows whose columns come from anybody in any order, and which tasks consume."""

    def __init__(
        self, tasks: Mapping[str, Iterable[str]], data: DataPlane, lease_s: float, samplers: Mapping[str, Sampler],
        budget_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Begin without rows.

        Args:
            tasks: for each task the columns that a row must have to be given to it.
            data: where this process writes and reads payload.
            lease_s: seconds without a sign of life after which rows are given to another.
            samplers: for each task which of its ready rows are given next.
            budget_bytes: of payload in the queue; None is as much as there is memory.
        """
        super().__init__(data, lease_s)
        self.tasks, self.table, self.samplers = Tasks(tasks), Table(), samplers
        self.tasks.facts = self._facts
        self.holders: dict[str, Holder] = {}
        self.groups: dict[Row, Any] = {}
        self.group_rows: Counter[Any] = Counter()
        self.tokens: dict[Row, int] = {}
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self.reserved: dict[str, tuple[int, float]] = {}
        """For each holder that is about to put something its bytes, and until when they are kept free."""
        self.finished = False
        self.place: Place | None = None
        """Where the queue's memory is, for processes of the same node."""

    @property
    def queues(self) -> Collection[Tasks]:
        """Return the one queue's tasks."""
        return (self.tasks,)

    def on_place(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return where the queue's memory is."""
        return {"place": self.place}, ()

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note a process that is there."""
        self.holders[request["holder"]] = Holder(request["holder"], request["address"])
        return {}, ()

    def on_reserve(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Keep bytes free for a put that follows; None while they are not."""
        now, size = time.monotonic(), request["bytes"]
        self.reserved = {name: kept for name, kept in self.reserved.items() if kept[1] > now}
        if self.budget_bytes is not None:
            if size > self.budget_bytes:
                raise ValueError(f"{size} bytes are put at once and the queue's budget is {self.budget_bytes}")
            if self.used_bytes + sum(kept for kept, _ in self.reserved.values()) + size > self.budget_bytes:
                return None
        self.reserved[request["holder"]] = size, now + self.lease_s
        return {}, ()

    def on_put(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note columns of rows, which are born with their first column. The same put again changes nothing.

        Refused with ValueError where a row has one of the columns already.
        """
        rows, block, columns = [row_name(row) for row in request["rows"]], Block(*request["block"]), request["columns"]
        self.reserved.pop(request["holder"], None)
        known = [self.table.parts.get(column, {}).get(row) for column in columns for row in rows]
        if known and all(part is not None and part.block == block for part in known):
            return {}, ()
        if any(part is not None for part in known):
            self.data.free([block])
            raise ValueError(f"a row of {rows[:4]} has one of the columns {', '.join(columns)} already")
        groups = [row_name(group) for group in request["groups"]] if request["groups"] else rows
        self._admit(dict(zip(rows, groups, strict=True)), request["table"])
        self.tokens.update(zip(rows, request["lengths"], strict=True) if request["lengths"] else ())
        self._store(StoredPart("", Rows({}), block, tuple(columns), len(rows), {r: n for n, r in enumerate(rows)}))
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Lease rows that are ready for a task; of kind `stop` when all rows are done and no more will come."""
        lost = self.lost(request["held"])
        for name in request["stages"]:
            if name not in self.tasks.tasks:
                raise ValueError(f"there is no task {name!r} among {', '.join(self.tasks.tasks)}")
            lease = self.tasks.take(
                name, request["holder"], time.monotonic(), self.lease_s, request["most"], self.samplers[name],
                request["ranks"], request.get("table"),
            )  # fmt: skip
            if lease is not None:
                columns = request.get("columns") or sorted(self.tasks.tasks[name].waits)
                return {
                    "kind": "rows", "stage": name, "leases": [[lease.number, len(lease.rows)]], "rows": lease.rows,
                    "payload": self.table.columns(lease.rows, columns), "lost": lost, "state": {}, "iteration": 0,
                }, ()  # fmt: skip
        over = self.finished and not any(any(self.tasks.tasks[name].undone.values()) for name in request["stages"])
        if over or self.stopping:
            return {"kind": "stop", "lost": lost}, ()
        return ({"kind": "lost", "lost": lost}, ()) if lost else None

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note leases that are done, with the columns that were written for their rows; return those that were lost."""
        parts, kept, lost = [StoredPart.received("", part, frames) for part in request["parts"]], set[Row](), []
        for number in request["leases"]:
            try:
                kept.update(self.tasks.acknowledge(number, time.monotonic()).rows)
            except LeaseLost:
                lost.append(number)
        for part in parts:
            part.rows = {row: place for row, place in part.rows.items() if row in kept}
            if part.rows:
                self._store(part)
            elif part.block is not None:
                self.data.free([part.block])
        self._leave(
            [row for row in kept if all(row in t.lease and t.lease[row] is None for t in self.tasks.tasks.values())]
        )
        return {"lost": lost}, ()

    def on_clear(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Let rows leave, done or not: those named, those of a table, or all."""
        chosen: Iterable[Row] = self.tasks.rows
        if request["rows"] is not None:
            chosen = [row for row in map(row_name, request["rows"]) if row in self.tasks.rows]
        elif request["table"] is not None:
            task = next(iter(self.tasks.tasks.values()))
            chosen = [row for row in self.tasks.rows if task.table[row] == request["table"]]
        self._leave(list(chosen))
        return {}, ()

    def on_finish(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note that no more rows will come."""
        self.finished = True
        return {}, ()

    def on_usage(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return bytes in use, and for each task who holds how many rows and how many nobody has taken."""
        held = Counter((lease.task, lease.holder) for lease in self.tasks.leases.held.values() for _ in lease.rows)
        left = {name: sum(task.undone.values()) for name, task in self.tasks.tasks.items()}
        holders = [[*key, rows] for key, rows in held.items()]
        return {"bytes": self.used_bytes, "rows": len(self.tasks.rows), "undone": left, "held": holders}, ()

    def fail(self, holder: str) -> list[Lease]:
        """Free what a process that is gone has held."""
        with self.changed:
            self.holders.pop(holder, None)
            return self.tasks.give_up(self.tasks.leases.of(holder))

    def _admit(self, groups: Mapping[Row, Any], table: Any) -> None:
        new = [row for row in groups if row not in self.tasks.rows]
        for row in new:
            self.groups[row] = groups[row]
            self.group_rows[groups[row]] += 1
        self.tasks.admit(new, groups.__getitem__, table)

    def _store(self, part: StoredPart) -> None:
        """Notes what was written for some rows, under the name of each column."""
        self.table.add(part, part.columns)
        if part.block is not None:
            self.used_bytes += part.block.size
        for column in part.columns:
            self.tasks.write(column, list(part.rows))

    def _leave(self, rows: Sequence[Row]) -> None:
        freed = self.table.evict(rows)
        self.used_bytes -= sum(block.size for block in freed)
        self.data.free(freed)
        self.tasks.forget(rows)
        for row in rows:
            group = self.groups.pop(row)
            self.group_rows[group] -= 1
            if not self.group_rows[group]:
                del self.group_rows[group]
            self.tokens.pop(row, None)

    def _facts(self, row: Row) -> Candidate:
        group = self.groups[row]
        return Candidate(row, group, self.group_rows[group], self.tokens.get(row, 0))

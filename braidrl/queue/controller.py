"""The controller of a `TransferQueue`: its answers to requests.

take ─────▶ tasks: a lease of ready rows, the location of their columns
put, done ─▶ table: new columns ─▶ rows ready for other tasks
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from braidrl.data.messages import Frame
from braidrl.queue.client import DataPlane
from braidrl.queue.samplers import Candidate, Sampler
from braidrl.queue.storage import Place
from braidrl.queue.table import Block, Row, StoredRows, Table, row_name
from braidrl.queue.tasks import Tasks
from braidrl.queue.transport import Answer, Holder, QueueController


class ColumnController(QueueController):
    """The rows of a `TransferQueue`: columns from any client, rows to each task once, and memory within a budget."""

    def __init__(
        self,
        tasks: Mapping[str, Collection[str]],
        samplers: Mapping[str, Sampler],
        data: DataPlane,
        place: Place,
        lease_s: float,
        budget_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Begin without rows; the arguments are those of `TransferQueue.serve`.

        Clients read and free payload through the node `place`.
        """
        super().__init__(lease_s, clock)
        self.columns = {name: sorted(columns) for name, columns in tasks.items()}
        self.samplers, self.data, self.place, self.budget_bytes = samplers, data, place, budget_bytes
        self.holders: dict[str, Holder] = {}
        self.tasks, self.table = Tasks(tasks), Table()
        self.tasks.facts = self._facts
        self.group_rows: Counter[Any] = Counter()
        self.tokens: dict[Row, int] = {}
        self.used_bytes = 0
        self.reserved: dict[str, tuple[int, float]] = {}
        """The reserved bytes of each holder that is about to put, and their deadline."""
        self.finished = False
        self.missing: dict[Row, list[str]] = {}
        """Columns with lost payload, which may be put again."""

    @property
    def queues(self) -> Collection[Tasks]:
        """Return all tasks."""
        return (self.tasks,)

    def on_directory(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return what a new client must know."""
        return {"place": self.place, "tasks": list(self.columns), "budget": self.budget_bytes is not None}, ()

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Register a process."""
        self.holders[request["holder"]] = Holder(request["holder"], request["address"], self.clock())
        return {}, ()

    def on_reserve(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Reserve bytes for a put that follows."""
        now, size = self.clock(), request["bytes"]
        self.reserved = {name: kept for name, kept in self.reserved.items() if kept[1] > now}
        if self.budget_bytes is not None:
            if size > self.budget_bytes:
                raise ValueError(f"{size} bytes are put at once and the queue's budget is {self.budget_bytes}")
            if self.used_bytes + sum(kept for kept, _ in self.reserved.values()) + size > self.budget_bytes:
                return None
        self.reserved[request["holder"]] = size, now + self.lease_s
        return {}, ()

    def on_put(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record columns of rows; the first column of a row admits it.

        Raises ValueError if a row has one of them already.
        """
        part, rows = StoredRows.received(request["part"], frames), [row_name(row) for row in request["rows"]]
        part.rows = {row: place for place, row in enumerate(rows)}
        if any(row in self.table.parts.get(column, ()) for column in part.columns for row in rows):
            self.data.free(part.blocks)
            raise ValueError(f"a row of {rows[:4]} has one of the columns {', '.join(part.columns)} already")
        self.reserved.pop(request["holder"], None)
        self.tokens.update(zip(rows, request["lengths"] or (), strict=False))
        groups = dict(zip(rows, map(row_name, request["groups"] or rows), strict=True))
        new = [row for row in rows if row not in self.tasks.rows]
        self.group_rows.update(map(groups.__getitem__, new))
        self.tasks.admit(new, groups.__getitem__, row_name(request["table"]))
        self._store(part)
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Lease ready rows; answer `stop` when all rows are done and no more will come."""
        (name,), lost = request["consumers"], self.lost(request["held"])
        lease = self.tasks.take(
            name,
            request["holder"],
            self.clock(),
            self.lease_s,
            request["most"],
            self.samplers[name],
            request["ranks"],
            row_name(request["table"]),
        )
        if lease is not None:
            payload = self.table.columns(lease.rows, request["columns"] or self.columns[name])
            return {
                "kind": "rows",
                "consumer": name,
                "lease": lease.number,
                "size": len(lease.rows),
                "rows": lease.rows,
                "payload": payload,
                "lost": lost,
            }, ()
        if self.finished and not any(self.tasks[name].undone.values()):
            return {"kind": "stop", "lost": lost}, ()
        return ({"kind": "lost", "lost": lost}, ()) if lost else None

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record completed leases, with the columns written for their rows; remove rows that all tasks have
        completed.
        """
        name = request["consumer"]
        parts = [(StoredRows.received(part, frames, name), part["rows"]) for part in request["parts"]]
        lost, held = self.tasks.held(request["done"], parts, self.clock())
        for lease, rows in held.items():
            self.tasks.finish(lease, rows)
        for part, _ in parts:
            if part.rows:
                self._store(part)
            else:
                self.data.free(part.blocks)
        states = [task.lease for task in self.tasks.tasks.values()]
        done = (row for rows in held.values() for row in rows)
        self._remove([row for row in done if all(state.get(row, 0) is None for state in states)])
        return {"lost": lost}, ()

    def on_finish(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record that no more rows will come."""
        self.finished = True
        return {}, ()

    def on_clear(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Remove rows, completed or not: the named ones, those of a table, or all."""
        wanted, table = request["rows"], row_name(request["table"])
        rows = self.tasks.rows if wanted is None else [r for r in map(row_name, wanted) if r in self.tasks.rows]
        known = next(iter(self.tasks.tasks.values())).table
        self._remove([row for row in rows if table is None or known[row] == table])
        return {}, ()

    def on_missing(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record blocks that a reader did not find.

        A task repeats the rows for which it wrote them; others must be put again.
        """
        blocks = {Block(*block) for block in request["blocks"]}
        names = set(self.data.segments.names())
        # Another node's server is not asked: it may be gone with the blocks.
        gone = {block for block in blocks if block.host != self.data.host or block.name not in names}
        parts = {part for parts in self.table.parts.values() for part in parts.values()}
        for part in (part for part in parts if not gone.isdisjoint(part.blocks)):
            rows = list(part.rows)
            self._free(self.table.remove(part))
            for column in part.columns:
                self.tasks.unwrite(column, rows)
            if part.writer:
                self.tasks[part.writer].reopen(rows)
            else:
                self.missing |= {row: [*self.missing.get(row, []), *part.columns] for row in rows}
        return {}, ()

    def on_usage(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return bytes and rows in the queue, lost columns, and for each task the rows to do and their holders."""
        held = Counter[tuple[Any, str]]()
        for lease in self.tasks.leases.held.values():
            held[lease.task, lease.holder] += lease.left
        return {
            "bytes": self.used_bytes,
            "rows": len(self.tasks.rows),
            "lost": list(self.missing.items()),
            "undone": {name: sum(task.undone.values()) for name, task in self.tasks.tasks.items()},
            "held": [[*who, rows] for who, rows in held.items()],
        }, ()

    def _store(self, part: StoredRows) -> None:
        """Add a part under the name of each of its columns."""
        self.table.add(part, part.columns)
        self.used_bytes += sum(block.size for block in part.blocks)
        rows = list(part.rows)
        for column in part.columns:
            self.tasks.write(column, rows)
        for row in rows if self.missing else ():
            left = [name for name in self.missing.pop(row, ()) if name not in part.columns]
            self.missing |= {row: left} if left else {}

    def _remove(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        for row in rows:
            group = self.tasks.group[row]
            self.group_rows[group] -= 1
            if not self.group_rows[group]:
                del self.group_rows[group]
            self.tokens.pop(row, None)
            self.missing.pop(row, None)
        self.tasks.forget(rows)
        self._free(self.table.evict(rows))

    def _free(self, blocks: Sequence[Block]) -> None:
        self.used_bytes -= sum(block.size for block in blocks)
        self.data.free(blocks)

    def _facts(self, row: Row) -> Candidate:
        group = self.tasks.group[row]
        return Candidate(row, group, self.group_rows[group], self.tokens.get(row, 0))

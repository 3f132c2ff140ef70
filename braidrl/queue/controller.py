"""The controller of a `TransferQueue`: its answers to requests.

take ─────▶ tasks: a lease of ready rows, the location of their columns
put, done ─▶ table: new columns ─▶ rows ready for other tasks
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, assert_never

from braidrl.data.messages import Frame
from braidrl.queue.calls import (
    NOTHING,
    Answer,
    AskDirectory,
    Clear,
    ColumnRequest,
    Directory,
    Done,
    Finish,
    GiveBack,
    Hello,
    LeasedColumns,
    Lost,
    Missing,
    Put,
    QueueUsage,
    Renew,
    Reserve,
    Stop,
    TakeColumns,
    Usage,
)
from braidrl.queue.client import DataPlane
from braidrl.queue.samplers import Candidate, Sampler
from braidrl.queue.storage import Place
from braidrl.queue.table import Block, Row, StoredRows, Table
from braidrl.queue.tasks import Tasks
from braidrl.queue.transport import Holder, QueueController


class ColumnController(QueueController):
    """The rows of a `TransferQueue`: columns from any client, rows to each task once, and memory within a budget."""

    def __init__(
        self,
        tasks: Mapping[str, Collection[str]],
        samplers: Mapping[str, Sampler],
        data: DataPlane,
        location: Place,
        lease_s: float,
        budget_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start without rows; the arguments are those of `TransferQueue.serve`.

        Clients read and free payload through the node `location`.
        """
        super().__init__(lease_s, clock)
        self.columns = {name: sorted(columns) for name, columns in tasks.items()}
        self.samplers, self.data, self.place, self.budget_bytes = samplers, data, location, budget_bytes
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

    def respond(self, request: ColumnRequest, frames: Sequence[Frame]) -> Answer | None:
        """Answer one request, or park it."""
        match request:
            case AskDirectory():
                return self.directory(), ()
            case Hello():
                self.holders[request.holder] = Holder(request.holder, request.address, self.clock())
                return NOTHING
            case Reserve():
                return self._reserve(request)
            case Put():
                return self._put(request, frames)
            case TakeColumns():
                return self._take(request)
            case Done():
                return self._done(request, frames)
            case Renew():
                return self.renew(request), ()
            case GiveBack():
                return self.give_back(request)
            case Finish():
                self.finished = True
                return NOTHING
            case Clear():
                return self._clear(request)
            case Missing():
                return self._missing(request)
            case Usage():
                return self._usage(), ()
            case _:
                assert_never(request)

    def directory(self) -> Directory:
        """Return the addresses and names that a new client needs."""
        return Directory(self.place, list(self.columns), self.budget_bytes is not None)

    def _reserve(self, request: Reserve) -> Answer | None:
        """Reserve bytes for a put that follows, or park it."""
        now, size = self.clock(), request.bytes
        self.reserved = {name: kept for name, kept in self.reserved.items() if kept[1] > now}
        if self.budget_bytes is not None:
            if size > self.budget_bytes:
                raise ValueError(f"{size} bytes are put in one call and the queue's budget is {self.budget_bytes}")
            if self.used_bytes + sum(kept for kept, _ in self.reserved.values()) + size > self.budget_bytes:
                return None
        self.reserved[request.holder] = size, now + self.lease_s
        return NOTHING

    def _put(self, request: Put, frames: Sequence[Frame]) -> Answer:
        """Record columns of rows. Raises ValueError if a row has one of them already."""
        (part,), rows = StoredRows.received([request.part], frames), request.rows
        part.rows = {row: position for position, row in enumerate(rows)}
        if any(row in self.table.parts.get(column, ()) for column in part.columns for row in rows):
            self.data.free(part.blocks)
            raise ValueError(f"a row of {rows[:4]} has one of the columns {', '.join(part.columns)} already")
        self.reserved.pop(request.holder, None)
        self.tokens.update(zip(rows, request.lengths or (), strict=False))
        groups = dict(zip(rows, request.groups or rows, strict=True))
        new = [row for row in rows if row not in self.tasks.rows]
        self.group_rows.update(map(groups.__getitem__, new))
        self.tasks.admit(new, groups.__getitem__, request.table)
        self._store(part)
        return NOTHING

    def _take(self, request: TakeColumns) -> Answer | None:
        """Lease ready rows; answer `Stop` when all rows are done and no more will come."""
        (name,), lost = request.consumers, self.lost(request.held)
        lease = self.tasks.take(
            name,
            request.holder,
            self.clock(),
            self.lease_s,
            request.most,
            self.samplers[name],
            request.ranks,
            request.table,
        )
        if lease is not None:
            payload = self.table.columns(lease.rows, request.columns or self.columns[name])
            size, rows = len(lease.rows), list(lease.rows)
            leased = LeasedColumns(consumer=name, lease=lease.number, size=size, payload=payload, rows=rows, lost=lost)
            return leased, ()
        if self.finished and not any(self.tasks[name].undone.values()):
            return Stop(lost=lost), ()
        return (Lost(lost=lost), ()) if lost else None

    def _done(self, request: Done, frames: Sequence[Frame]) -> Answer:
        """Record completed leases, with the columns written for their rows; remove rows completed in all tasks."""
        name = request.consumer
        received = StoredRows.received([part for part, _ in request.parts], frames, name)
        parts = [(part, rows) for part, (_, rows) in zip(received, request.parts, strict=True)]
        lost, rows_by_lease = self.tasks.rows_by_lease(request.done, parts, self.clock())
        for lease, rows in rows_by_lease.items():
            self.tasks.finish(lease, rows)
        for part, _ in parts:
            if part.rows:
                self._store(part)
            else:
                self.data.free(part.blocks)
        states = [task.lease for task in self.tasks.tasks.values()]
        done = (row for rows in rows_by_lease.values() for row in rows)
        self._remove([row for row in done if all(state.get(row, 0) is None for state in states)])
        return Lost(lost=lost), ()

    def _clear(self, request: Clear) -> Answer:
        """Remove rows, completed or not: the named ones, those of a table, or all."""
        named_rows, table = request.rows, request.table
        rows = self.tasks.rows if named_rows is None else [row for row in named_rows if row in self.tasks.rows]
        table_of = next(iter(self.tasks.tasks.values())).table
        self._remove([row for row in rows if table is None or table_of[row] == table])
        return NOTHING

    def _missing(self, request: Missing) -> Answer:
        """Record blocks that a reader did not find.

        A task repeats the rows for which it wrote them; other columns must be put again.
        """
        blocks, names = set(request.blocks), set(self.data.segments.names())
        # Do not query another node's server: it may have ended with the blocks.
        missing = {block for block in blocks if block.host != self.data.host or block.name not in names}
        parts = {part for parts in self.table.parts.values() for part in parts.values()}
        for part in (part for part in parts if not missing.isdisjoint(part.blocks)):
            rows = list(part.rows)
            self._free(self.table.remove(part))
            for column in part.columns:
                self.tasks.unwrite(column, rows)
            if part.writer:
                self.tasks[part.writer].reopen(rows)
            else:
                self.missing |= {row: [*self.missing.get(row, []), *part.columns] for row in rows}
        return NOTHING

    def _usage(self) -> QueueUsage:
        """Return bytes and rows in the queue, lost columns, and for each task its open rows and their holders."""
        leased_rows = Counter[tuple[str, str]]()
        for lease in self.tasks.leases.held.values():
            leased_rows[lease.task, lease.holder] += lease.left
        return QueueUsage(
            self.used_bytes,
            len(self.tasks.rows),
            list(self.missing.items()),
            {name: sum(task.undone.values()) for name, task in self.tasks.tasks.items()},
            [(task, holder, rows) for (task, holder), rows in leased_rows.items()],
        )

    def _store(self, part: StoredRows) -> None:
        """Store a part under the name of each of its columns."""
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

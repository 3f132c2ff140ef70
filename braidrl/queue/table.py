"""The queue's table: index columns and payload locations, by row and by the stage that wrote them.

A column version is identified by (name, writer), and a writer writes its columns of a row together. So the table keeps
*parts*, which one writer wrote for some rows at once, and finds columns by writer. A part's memory is freed with its
last row.

`Leases` says which worker holds which rows, and until when.
"""

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from braidrl.data.codec import decode, encode
from braidrl.data.messages import Frame, Message
from braidrl.data.rows import Column, Rows

RowName = int | float | str | tuple[int | float | str, ...]
"""A row's name as it travels."""
Row = Any
"""A row's name, also of rows that do not travel: any value that can be a key."""
Positions = Sequence[tuple[int, Sequence[int] | None]]
"""Rows by lease number and positions in the lease; None is all rows that are left."""


class Block(NamedTuple):
    """The location of frames: a segment of a node, and the address of the server that sends them to other nodes."""

    host: str
    address: str
    name: str
    size: int


class TablePiece(NamedTuple):
    """The location of some rows' columns: a block, the rows within it, and their positions among the requested rows.

    `positions` in the block and `targets` among the requested rows are None if the requested rows are those of the
    block, in its order.
    """

    block: Block | None
    columns: Sequence[str]
    rows: int
    """Number of rows in the block."""
    positions: Sequence[int] | None = None
    targets: Sequence[int] | None = None


class StoredMessage(Message):
    """Stored rows in a message; their index columns are some of its frames, which other parts may share."""

    payload: list[TablePiece]
    first: int
    """Index of the first of these frames."""
    frames: int
    """Number of these frames."""
    start: int = 0
    """Position of the first of these rows in the frames."""
    size: int | None = None
    """Number of these rows in the frames; None means all."""


@dataclass(eq=False)
class StoredRows:
    """Rows in a process that does not read their payload: index columns, and pieces of blocks with the other columns.

    What one writer writes for some rows at once is a *part*: its columns are in one block, and `rows` has the rows'
    names.
    """

    index: Rows
    payload: list[TablePiece] = field(default_factory=list)
    writer: str = ""
    """The stage or task that wrote a part."""
    rows: dict[Row, int] = field(default_factory=dict)
    """The position of each row of a part; some of its rows may have been removed since."""

    @staticmethod
    def of_block(index: Rows, block: Block | None, columns: Sequence[str], size: int) -> "StoredRows":
        """Return rows of a single block, in its order; `columns` are not among the index columns."""
        return StoredRows(index, [TablePiece(block, list(columns), size)] if block is not None else [])

    @staticmethod
    def received(parts: Sequence[StoredMessage], frames: Sequence[Frame], writer: str = "") -> "list[StoredRows]":
        """Decode rows from messages with these frames; the caller adds the rows' names."""
        decoded, stored = {0: Rows({})}, list[StoredRows]()
        for part in parts:
            first, count = part.first, part.frames
            if (key := first + 1 if count else 0) not in decoded:
                decoded[key] = decode(list(frames[first : first + count]))
            index = decoded[key] if part.size is None else decoded[key].part(part.start, part.start + part.size)
            stored.append(StoredRows(index, part.payload, writer))
        return stored

    def message(self, frames: list[Frame]) -> StoredMessage:
        """Encode the rows for a message, without their names; append the index columns to the message's frames."""
        encoded, first = encode(self.index) if len(self.index) else [], len(frames)
        frames += encoded
        return StoredMessage(self.payload, first, len(encoded))

    def __len__(self) -> int:
        return len(self.index) or (self.payload[0].rows if self.payload else 0)

    def uids(self) -> list[Row]:
        """Return the rows' names."""
        return list(self.index.uids())

    @property
    def stored(self) -> list[str]:
        """Return the names of the columns that are in blocks."""
        return [name for piece in self.payload for name in piece.columns]

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns."""
        return [*self.index, *self.stored]

    @property
    def blocks(self) -> set[Block]:
        """Return the blocks that hold the payload."""
        return {piece.block for piece in self.payload if piece.block is not None}

    def without(self, names: Collection[str]) -> "StoredRows":
        """Return these rows without some columns."""
        return StoredRows(self.index.without(list(names)), pieces_without(self.payload, names))

    def part(self, writer: str, names: Collection[str]) -> "StoredRows":
        """Return some columns as a part of `writer`. The rows must be in one block."""
        assert len(self.payload) <= 1, "rows that are put into the queue lie in one block"
        pieces = [p._replace(columns=[name for name in p.columns if name in names]) for p in self.payload]
        position_of = {uid: position for position, uid in enumerate(self.uids())}
        return StoredRows(self.index.only([name for name in self.index if name in names]), pieces, writer, position_of)


def pieces_without(pieces: Iterable[TablePiece], names: Collection[str]) -> list[TablePiece]:
    """Return the locations of all but some columns."""
    left = (piece._replace(columns=[name for name in piece.columns if name not in names]) for piece in pieces)
    return [piece for piece in left if piece.columns]


class HeldBlocks:
    """Reference counts of blocks: by parts in tables, and by `StoredRows` in use.

    A block without references is free.
    """

    def __init__(self) -> None:
        self.counts: Counter[Block] = Counter()
        self._dropped: deque[set[Block]] = deque()

    def release(self, blocks: Iterable[Block]) -> list[Block]:
        """Remove a reference from each block; return those that are now free."""
        freed = []
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]
                freed.append(block)
        return freed

    def hold_for(self, rows: StoredRows) -> StoredRows:
        """Keep the blocks of rows until the object is deleted."""
        blocks = rows.blocks
        self.counts.update(blocks)
        # The object may be deleted in any thread, under any lock: `freed` does the rest.
        weakref.finalize(rows, self._dropped.append, blocks).atexit = False
        return rows

    def freed(self) -> list[Block]:
        """Return the blocks freed since the objects of `hold_for` were deleted."""
        blocks: list[Block] = []
        while self._dropped:
            blocks += self.release(self._dropped.popleft())
        return blocks


class Table:
    """The parts with the columns of rows in work."""

    def __init__(self, held: HeldBlocks | None = None) -> None:
        """Start without rows; `held` has the reference counts of several tables."""
        self.parts: dict[str, dict[Row, StoredRows]] = {}
        self.held = held or HeldBlocks()

    def add(self, part: StoredRows, writers: Iterable[str] | None = None) -> None:
        """Add a part, under its writer's name or under several names."""
        self.held.counts.update(part.blocks)
        for writer in writers or (part.writer,):
            self.parts.setdefault(writer, {}).update(dict.fromkeys(part.rows, part))

    def replace(self, part: StoredRows) -> list[Block]:
        """Replace the part of the same writer; return the blocks to free."""
        parts = self.parts.get(part.writer, {})
        before = set(map(parts.__getitem__, part.rows.keys() & parts.keys())) if parts else ()
        self.add(part)
        return self._drop(part.rows.keys(), before)

    def remove(self, part: StoredRows) -> list[Block]:
        """Remove a part that is stored under the names of its columns; return its block if it is free."""
        for column in part.columns:
            for row in part.rows:
                del self.parts[column][row]
        return self.held.release(part.blocks)

    def stored(self, uids: Sequence[Row], writers: Sequence[str]) -> StoredRows:
        """Return rows with the parts of some writers; their memory is kept while the result exists."""
        shares = {writer: self._shares(uids, writer) for writer in writers}
        return self.held.hold_for(StoredRows(indexed(shares), located(shares, None)))

    def index(self, uids: Sequence[Row], writers: Sequence[str]) -> Rows:
        """Return the index columns of these rows in this order; of one name, the last writer's.

        A writer that has not written every row is skipped.
        """
        return indexed({writer: self._shares(uids, writer) for writer in writers})

    def payload(
        self, uids: Sequence[Row], writers: Sequence[str], names: Collection[str] | None, index: bool = False
    ) -> list[TablePiece]:
        """Return the locations of the named payload columns (None: all): pieces of blocks, with `targets` among `uids`.

        With `index` include the locations of all index columns. Of one name, the last writer's column is used.
        """
        return located({writer: self._shares(uids, writer) for writer in writers}, names, index)

    def columns(self, rows: Sequence[Row], names: Sequence[str]) -> list[TablePiece]:
        """Return the locations of columns stored under their own names, as `payload` does.

        Raises KeyError if one is missing.
        """
        shares, alike = dict[Any, PartRows](), defaultdict[Any, list[str]](list)
        for name in names if rows else ():
            if not (parts := self._shares(rows, name)):
                raise KeyError(f"a row of {list(rows)[:4]} has no column {name}")
            for share in parts:
                # Columns that one part has for the same rows are one piece.
                key = share.part, tuple(share.targets)
                shares[key] = share
                alike[key].append(name)
        return [shares[key].piece(columns) for key, columns in alike.items()]

    def evict(self, uids: Iterable[Row]) -> list[Block]:
        """Remove rows; return the blocks to free."""
        removed, parts = set(uids), set[StoredRows]()
        for parts_of_writer in self.parts.values():
            # A writer of several names has stored the same part under each.
            if parts_of_writer.keys() <= removed:
                parts.update(parts_of_writer.values())
                parts_of_writer.clear()
            else:
                parts.update(parts_of_writer.pop(uid) for uid in removed & parts_of_writer.keys())
        return self._drop(removed, parts)

    def _drop(self, gone: Set[Row], parts: Iterable[StoredRows]) -> list[Block]:
        """Remove rows from parts; return the blocks to free."""
        freed = []
        for part in parts:
            if part.rows.keys() <= gone:
                part.rows.clear()
                freed += self.held.release(part.blocks)
            else:
                for uid in part.rows.keys() & gone:
                    del part.rows[uid]
        return freed

    def _shares(self, uids: Sequence[Row], writer: str) -> "list[PartRows]":
        """Return a writer's parts of these rows; empty unless all of them are written."""
        try:
            parts = list(map(self.parts[writer].__getitem__, uids))
        except KeyError:
            return []
        if not parts or parts.count(parts[0]) == len(parts):
            return [PartRows(part, range(len(parts)), list(map(part.rows.__getitem__, uids))) for part in parts[:1]]
        targets: defaultdict[StoredRows, list[int]] = defaultdict(list)
        for target, part in enumerate(parts):
            targets[part].append(target)
        return [
            PartRows(part, positions, [part.rows[uids[target]] for target in positions])
            for part, positions in targets.items()
        ]


class PartRows(NamedTuple):
    """Requested rows that are in one part."""

    part: StoredRows
    targets: Sequence[int]
    """Their positions among the requested rows."""
    positions: list[int]
    """Their positions in the part."""

    @property
    def is_all(self) -> bool:
        """Return True if they are all rows of the part, in its order."""
        return len(self.positions) == len(self.part) and self.positions == list(range(len(self.part)))

    def piece(self, columns: Sequence[str]) -> TablePiece:
        """Return the location of some columns."""
        block = self.part.payload[0].block if self.part.payload else None
        # With one part for all requested rows, `targets` is a range.
        if isinstance(self.targets, range) and self.is_all:
            return TablePiece(block, columns, len(self.part))
        return TablePiece(block, columns, len(self.part), self.positions, list(self.targets))


def indexed(shares: Mapping[str, Sequence[PartRows]]) -> Rows:
    """Return the index columns of rows, from the parts of each writer."""
    columns = dict[str, Column]()
    for parts in filter(None, shares.values()):
        if not list(parts[0].part.index):
            continue
        # One array of all parts, from which rows are taken once: most parts are small, and needed completely.
        rows, positions, start = list[Rows](), list[int](), 0
        for share in parts:
            is_small = len(share.part) <= 2 * len(share.positions)
            rows.append(share.part.index if is_small else share.part.index.take(share.positions))
            positions += [start + at for at in share.positions] if is_small else range(start, start + len(rows[-1]))
            start += len(rows[-1])
        targets = [target for share in parts for target in share.targets]
        if targets != list(range(len(targets))):
            positions = [positions[number] for number in np.argsort(targets)]
        table = Rows.cat(rows)
        columns.update((table if positions == list(range(start)) else table.take(positions)).items())
    return Rows(columns)


def located(
    shares: Mapping[str, Sequence[PartRows]], names: Collection[str] | None, index: bool = False
) -> list[TablePiece]:
    """Return the locations of rows' columns in each writer's parts; `names` and `index` are as for `Table.payload`."""
    source = dict[str, str]()
    for writer, parts in shares.items():
        # All parts of a writer have the same columns.
        for share in parts[:1]:
            source.update({name: writer for name in share.part.stored if names is None or name in names})
            source.update(dict.fromkeys(share.part.index if index else (), writer))
    chosen = defaultdict[str, list[str]](list)
    for name, writer in source.items():
        chosen[writer].append(name)
    return [share.piece(columns) for writer, columns in chosen.items() for share in shares[writer]]


def in_order(rows: Rows, positions: Sequence[int]) -> Rows:
    """Return rows by position, from the first position to the last."""
    if list(positions) == sorted(positions):
        return rows
    return rows.take(sorted(range(len(positions)), key=positions.__getitem__))


@dataclass(eq=False)
class Lease:
    """Rows that `holder` works on for `task` until `deadline`."""

    number: int
    task: Any
    holder: str
    rows: tuple[Row, ...]
    deadline: float
    left: int = 0
    """Number of its rows that are not completed."""
    ended: int = 0
    """Number of its rows, completed or not, that no longer need a slot of their engine."""


class Leases:
    """All active leases of a queue by number and by holder.

    An expired lease is lost: another holder may have its rows.
    """

    def __init__(self) -> None:
        self.held: dict[int, Lease] = {}
        self.by_holder: defaultdict[str, set[int]] = defaultdict(set)
        self.rows_of: Counter[str] = Counter()
        """Number of rows that each holder has."""
        self.changed: set[str] = set()
        """Holders whose rows have changed since a caller has looked."""
        self.numbers = count()

    def take(self, task: Hashable, holder: str, rows: Sequence[Row], now: float, seconds: float) -> Lease:
        """Lease rows to a holder for this many seconds."""
        number = next(self.numbers)
        lease = Lease(number, task, holder, tuple(rows), now + seconds, len(rows))
        self.by_holder[holder].add(number)
        self.rows_of[holder] += len(rows)
        self.changed.add(holder)
        self.held[number] = lease
        return lease

    def shrink(self, lease: Lease, rows: int) -> None:
        """Record that some rows of a lease are completed or released; after its last row a lease ends."""
        lease.left -= rows
        self.rows_of[lease.holder] -= rows
        self.changed.add(lease.holder)
        if lease.left:
            return
        del self.held[lease.number]
        self.by_holder[lease.holder].discard(lease.number)
        if not self.by_holder[lease.holder]:
            del self.by_holder[lease.holder], self.rows_of[lease.holder]

    def running(self, holder: str) -> int:
        """Return the number of a holder's rows that need a slot of its engine."""
        leases = (self.held[number] for number in self.by_holder.get(holder, ()))
        return sum(min(lease.left, len(lease.rows) - lease.ended) for lease in leases)

    def of(self, holder: str) -> list[Lease]:
        """Return the leases of one holder."""
        return [self.held[number] for number in sorted(self.by_holder.get(holder, ()))]

    def expired(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed."""
        return [lease for lease in self.held.values() if lease.deadline < now]

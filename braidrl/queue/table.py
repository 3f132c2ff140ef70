"""The queue's table: for each row and each stage that wrote it, the index columns themselves and where the payload lies.

A column version is known by (name, writer), and a writer's columns of one row come together: so the table keeps *parts*, what one
writer wrote for some rows at once, and looks columns up by writer. A part's memory is freed when its last row leaves.
"""

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.rows import Column, Rows

Row = Any
"""A row's name: a number, a string or a tuple of these."""


class Block(NamedTuple):
    """Where some frames lie: a segment of a node, and the address at which that node's server gives them to others."""

    host: str
    address: str
    name: str
    size: int


@dataclass(eq=False)
class StoredPart:
    """What `writer` wrote for some rows: index columns, and a block with its payload columns."""

    writer: str
    index: Rows
    block: Block | None
    columns: tuple[str, ...]
    size: int
    """Rows that were written, of which some may have left."""
    rows: dict[Row, int] = field(default_factory=dict)
    """The place of each row that has not left."""

    def message(self, frames: list[Frame]) -> dict[str, Any]:
        """Return the part as a message holds it; appends the index columns to the message's frames."""
        own, first = encode(self.index), len(frames)
        frames += own
        return {"uids": list(self.rows), "block": self.block, "columns": self.columns, "frames": [first, len(own)]}

    @staticmethod
    def received(writer: str, message: Mapping[str, Any], frames: Sequence[Frame]) -> "StoredPart":
        """Return the part that a message with these frames holds."""
        first, count = message["frames"]
        rows = {row_name(uid): place for place, uid in enumerate(message["uids"])}
        block = Block(*message["block"]) if message["block"] else None
        index = decode(list(frames[first : first + count]))
        return StoredPart(writer, index, block, tuple(message["columns"]), len(rows), rows)


@dataclass(eq=False)
class StoredRows:
    """Rows as a process knows them that never reads their payload: index columns, and pieces of blocks that hold the others."""

    index: Rows
    payload: list[dict[str, Any]] = field(default_factory=list)
    """As `Table.payload` says it."""

    def __len__(self) -> int:
        return len(self.index)

    def uids(self) -> list[Row]:
        """Return the rows' names."""
        return list(self.index.uids())

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns."""
        return [*self.index, *(name for piece in self.payload for name in piece["columns"])]

    @property
    def blocks(self) -> set[Block]:
        """Return the blocks that hold the payload."""
        return {Block(*piece["block"]) for piece in self.payload}

    def with_added(self, later: "StoredRows") -> "StoredRows":
        """Return these rows with the columns that the same rows have under new names in `later`."""
        known = set(self.columns)
        pieces = ({**p, "columns": [name for name in p["columns"] if name not in known]} for p in later.payload)
        index = self.index.with_columns({name: column for name, column in later.index.items() if name not in known})
        return StoredRows(index, [*self.payload, *(piece for piece in pieces if piece["columns"])])

    def part(self, writer: str, names: Iterable[str], rows: Iterable[Row] | None = None) -> StoredPart:
        """Return some columns of all rows, or of those named, as what `writer` wrote. Of rows that were put into one block."""
        wanted, uids = set(names), self.uids()
        assert len(self.payload) <= 1, "rows that are put into the queue lie in one block"
        columns, block = tuple[str, ...](), None
        for piece in self.payload:
            columns = tuple(name for name in piece["columns"] if name in wanted)
            block = Block(*piece["block"]) if columns else None
        places = {uid: place for place, uid in enumerate(uids)}
        kept = places if rows is None else {uid: places[uid] for uid in rows}
        return StoredPart(
            writer, self.index.only([n for n in self.index if n in wanted]), block, columns, len(uids), kept
        )


class HeldBlocks:
    """Counts for each block what needs it: parts in tables, and `StoredRows` that live. A block that nothing needs is free."""

    def __init__(self) -> None:
        self._counts: Counter[Block] = Counter()
        self._dropped: deque[set[Block]] = deque()

    def __iter__(self) -> Iterator[Block]:
        return iter(self._counts)

    def hold(self, blocks: Iterable[Block]) -> None:
        """Note one more need of each block."""
        self._counts.update(blocks)

    def let_go(self, blocks: Iterable[Block]) -> list[Block]:
        """Note one need less of each block; return those that are free by it."""
        freed = []
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                freed.append(block)
        return freed

    def hold_for(self, rows: StoredRows) -> StoredRows:
        """Hold the blocks of rows as long as the object lives."""
        blocks = rows.blocks
        self.hold(blocks)
        # The last reference may go in any thread, whatever that holds: `freed` does the rest.
        weakref.finalize(rows, self._dropped.append, blocks).atexit = False
        return rows

    def freed(self) -> list[Block]:
        """Return the blocks that are free since rows were dropped that held them."""
        found: list[Block] = []
        while self._dropped:
            found += self.let_go(self._dropped.popleft())
        return found


def row_name(name: Any) -> Row:
    """Return a row's name from what came over the wire, where tuples are lists."""
    return tuple(name) if isinstance(name, list) else name


def home(row: Row, units: int) -> int:
    """Return which of so many storage units a row belongs to; of names that are tuples the first part decides."""
    return crc32(msgpack.packb(row[0] if isinstance(row, tuple) else row)) % units if units > 1 else 0


class Table:
    """The parts that hold the columns of rows in work."""

    def __init__(self, held: HeldBlocks | None = None) -> None:
        """Begin without rows; `held` counts the blocks of several tables."""
        self.parts: dict[str, dict[Row, StoredPart]] = {}
        self.held = held or HeldBlocks()

    def add(self, part: StoredPart, writers: Iterable[str] | None = None) -> None:
        """Note what was written, under its writer's name or under several."""
        if part.block is not None:
            self.held.hold([part.block])
        for writer in writers or (part.writer,):
            self.parts.setdefault(writer, {}).update(dict.fromkeys(part.rows, part))

    def replace(self, part: StoredPart) -> list[Block]:
        """Note what was written in place of what the same writer wrote before; return the blocks that held nothing else."""
        known = self.parts.get(part.writer, {})
        before = [(row, known[row]) for row in part.rows if row in known]
        self.add(part)
        return self._drop(before)

    def stored(self, uids: Sequence[Row], writers: Sequence[str]) -> StoredRows:
        """Return rows with all that some writers have written, whose memory stays as long as the result lives."""
        return self.held.hold_for(StoredRows(self.index(uids, writers), self.payload(uids, writers, None)))

    def index(self, uids: Sequence[Row], writers: Sequence[str]) -> Rows:
        """Return the index columns of these rows in the order given; of one name, that of the last writer.

        A writer that has not written every one of the rows is left out.
        """
        columns: dict[str, Column] = {}
        for writer in self._writers_of(uids, writers):
            columns.update(self._gathered(uids, writer).items())
        return Rows(columns)

    def payload(self, uids: Sequence[Row], writers: Sequence[str], wanted: set[str] | None) -> list[dict[str, Any]]:
        """Return where to read the wanted payload columns (None: all): pieces of blocks, with `places` among `uids`."""
        source: dict[str, str] = {}
        for writer in self._writers_of(uids, writers):
            columns = self.parts[writer][uids[0]].columns
            source.update({name: writer for name in columns if wanted is None or name in wanted})
        pieces = []
        for writer in dict.fromkeys(source.values()):
            names = [name for name, chosen in source.items() if chosen == writer]
            for part, places in self._by_part(uids, writer).items():
                pieces.append(piece(part, names, places, uids))
        return pieces

    def columns(self, rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return where to read columns that were noted under their own names, as `payload` does. Raises KeyError where one is missing."""
        found: dict[tuple[StoredPart, tuple[int, ...]], list[str]] = {}
        for name in names:
            for part, places in self._by_part(rows, name).items():
                found.setdefault((part, tuple(places)), []).append(name)
        return [piece(part, columns, list(places), rows) for (part, places), columns in found.items()]

    def evict(self, uids: Iterable[Row]) -> list[Block]:
        """Let rows leave; return the blocks that are free."""
        uids, places = list(uids), dict[tuple[Row, StoredPart], None]()
        for known in self.parts.values():
            # A writer of several names has noted one part under each.
            places |= {(uid, part): None for uid in uids if (part := known.pop(uid, None)) is not None}
        return self._drop(places)

    def _drop(self, places: Iterable[tuple[Row, StoredPart]]) -> list[Block]:
        freed = []
        for uid, part in places:
            del part.rows[uid]
            if not part.rows and part.block is not None:
                freed += self.held.let_go([part.block])
        return freed

    def _writers_of(self, uids: Sequence[Row], writers: Sequence[str]) -> list[str]:
        wanted = set(uids)
        return [w for w in writers if w in self.parts and wanted and self.parts[w].keys() >= wanted]

    def _by_part(self, uids: Sequence[Row], writer: str) -> dict[StoredPart, list[int]]:
        parts = list(map(self.parts[writer].__getitem__, uids))
        if parts and parts.count(parts[0]) == len(parts):
            return {parts[0]: list(range(len(parts)))}
        places: defaultdict[StoredPart, list[int]] = defaultdict(list)
        for place, part in enumerate(parts):
            places[part].append(place)
        return dict(places)

    def _gathered(self, uids: Sequence[Row], writer: str) -> Rows:
        found, order = [], []
        for part, places in self._by_part(uids, writer).items():
            positions = [part.rows[uids[place]] for place in places]
            found.append(part.index if positions == list(range(part.size)) else part.index.take(positions))
            order += places
        return in_order(Rows.cat(found), order)


def piece(part: StoredPart, columns: Sequence[str], places: Sequence[int], rows: Sequence[Row]) -> dict[str, Any]:
    """Return where columns of one part lie for those of `rows` that stand at `places`."""
    assert part.block is not None
    positions = [part.rows[rows[place]] for place in places]
    return {"columns": columns, "block": part.block, "rows": part.size, "positions": positions, "places": places}


def in_order(rows: Rows, places: Sequence[int]) -> Rows:
    """Return rows that stand for these places, from the first place to the last."""
    if list(places) == sorted(places):
        return rows
    return rows.take(sorted(range(len(places)), key=places.__getitem__))

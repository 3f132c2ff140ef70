"""The queue's table: for each row and each stage that wrote it, the index columns themselves and where the payload lies.

A column version is known by (name, writer), and a writer's columns of one row come together: so the table keeps *parts*, what one
writer wrote for some rows at once, and looks columns up by writer. A part's memory is freed when its last row leaves.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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


def row_name(name: Any) -> Row:
    """Return a row's name from what came over the wire, where tuples are lists."""
    return tuple(name) if isinstance(name, list) else name


def home(row: Row, units: int) -> int:
    """Return which of so many storage units a row belongs to; of names that are tuples the first part decides."""
    return crc32(msgpack.packb(row[0] if isinstance(row, tuple) else row)) % units if units > 1 else 0


Detached = list[tuple[Row, StoredPart]]


class Table:
    """All parts of the rows in work."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[Row, StoredPart]] = {}
        self.detached: list[Detached] = []

    def add(self, part: StoredPart, writers: Sequence[str] = ()) -> None:
        """Note what was written, under its writer's name or under several."""
        for writer in writers or (part.writer,):
            self.parts.setdefault(writer, {}).update(dict.fromkeys(part.rows, part))

    def replace(self, part: StoredPart) -> list[Block]:
        """Note what was written in place of what the same writer wrote before; return the blocks that held nothing else."""
        known = self.parts.get(part.writer, {})
        before = [(row, known[row]) for row in part.rows if row in known]
        self.add(part)
        return self.drop(before)

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
        """Let rows leave; return the blocks that held no others."""
        return self.drop(self.detach(uids))

    def detach(self, uids: Iterable[Row]) -> Detached:
        """Let rows leave the table; what they have written stays where it is until it is dropped."""
        uids, places = list(uids), dict[tuple[Row, StoredPart], None]()
        for known in self.parts.values():
            # A writer of several names has noted one part under each.
            places |= {(uid, part): None for uid in uids if (part := known.pop(uid, None)) is not None}
        self.detached.append(list(places))
        return self.detached[-1]

    def drop(self, places: Detached) -> list[Block]:
        """Drop detached rows that are not needed any more; return the blocks that held no others."""
        self.detached = [known for known in self.detached if known is not places]
        freed = []
        for uid, part in places:
            del part.rows[uid]
            if not part.rows and part.block is not None:
                freed.append(part.block)
        return freed

    def blocks(self) -> set[Block]:
        """Return all blocks that may still be read."""
        attached = (part for parts in self.parts.values() for part in parts.values())
        detached = (part for places in self.detached for _, part in places)
        return {part.block for part in chain(attached, detached) if part.block is not None}

    def _writers_of(self, uids: Sequence[Row], writers: Sequence[str]) -> list[str]:
        wanted = set(uids)
        return [w for w in writers if w in self.parts and wanted and self.parts[w].keys() >= wanted]

    def _by_part(self, uids: Sequence[Row], writer: str) -> dict[StoredPart, list[int]]:
        places: defaultdict[StoredPart, list[int]] = defaultdict(list)
        for place, part in enumerate(map(self.parts[writer].__getitem__, uids)):
            places[part].append(place)
        return dict(places)

    def _gathered(self, uids: Sequence[Row], writer: str) -> Rows:
        found, order = [], []
        for part, places in self._by_part(uids, writer).items():
            found.append(part.index.take([part.rows[uids[place]] for place in places]))
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

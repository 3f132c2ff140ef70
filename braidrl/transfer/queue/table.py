"""The queue's table: for each row and each stage that wrote it, the index columns themselves and where the payload lies.

A column version is known by (name, writer), and a writer's columns of one row come together: so the table keeps *parts*, what one
writer wrote for some rows at once, and looks columns up by writer. A part's memory is freed when its last row leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from braidrl.data.rows import Column, Rows
from braidrl.flow.readiness import Uid
from braidrl.transfer.queue.data_plane import Block


@dataclass(eq=False)
class StoredPart:
    """What `writer` wrote for some rows: index columns, and a block with its payload columns."""

    writer: str
    index: Rows
    block: Block | None
    columns: tuple[str, ...]
    size: int
    """Rows that were written, of which some may have left."""
    rows: dict[Uid, int] = field(default_factory=dict)
    """The place of each row that has not left."""


Detached = list[tuple[Uid, StoredPart]]


class Table:
    """All parts of the rows in work."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[Uid, StoredPart]] = {}
        self.detached: list[Detached] = []

    def add(self, part: StoredPart) -> None:
        """Notes what was written."""
        self.parts.setdefault(part.writer, {}).update(dict.fromkeys(part.rows, part))

    def index(self, uids: Sequence[Uid], writers: Sequence[str]) -> Rows:
        """The index columns of these rows in the order given; of one name, that of the last writer.

        A writer that has not written every one of the rows is left out.
        """
        columns: dict[str, Column] = {}
        for writer in self._writers_of(uids, writers):
            columns.update(self._gathered(uids, writer).items())
        return Rows(columns)

    def payload(self, uids: Sequence[Uid], writers: Sequence[str], wanted: set[str] | None) -> list[dict[str, Any]]:
        """Where to read the wanted payload columns (None: all): pieces of blocks, with `places` among `uids`."""
        source: dict[str, str] = {}
        for writer in self._writers_of(uids, writers):
            columns = self.parts[writer][uids[0]].columns
            source.update({name: writer for name in columns if wanted is None or name in wanted})
        pieces = []
        for writer in dict.fromkeys(source.values()):
            names = [name for name, chosen in source.items() if chosen == writer]
            for part, places in self._by_part(uids, writer).items():
                assert part.block is not None
                positions = [part.rows[uids[place]] for place in places]
                pieces.append(
                    {"columns": names, "block": part.block, "rows": part.size, "positions": positions, "places": places}
                )  # fmt: skip
        return pieces

    def evict(self, uids: Iterable[Uid]) -> list[Block]:
        """Rows leave; the blocks that held no others."""
        return self.drop(self.detach(uids))

    def detach(self, uids: Iterable[Uid]) -> Detached:
        """Rows leave the table, but what they have written stays where it is until it is dropped."""
        places = [(uid, part) for uid in uids for parts in self.parts.values() if (part := parts.pop(uid, None))]
        self.detached.append(places)
        return places

    def drop(self, places: Detached) -> list[Block]:
        """Detached rows are not needed any more; the blocks that held no others."""
        self.detached = [known for known in self.detached if known is not places]
        freed = []
        for uid, part in places:
            del part.rows[uid]
            if not part.rows and part.block is not None:
                freed.append(part.block)
        return freed

    def blocks(self) -> set[Block]:
        """All blocks that may still be read."""
        attached = (part for parts in self.parts.values() for part in parts.values())
        detached = (part for places in self.detached for _, part in places)
        return {part.block for part in chain(attached, detached) if part.block is not None}

    def _writers_of(self, uids: Sequence[Uid], writers: Sequence[str]) -> list[str]:
        return [w for w in writers if w in self.parts and uids and all(uid in self.parts[w] for uid in uids)]

    def _by_part(self, uids: Sequence[Uid], writer: str) -> dict[StoredPart, list[int]]:
        places: defaultdict[StoredPart, list[int]] = defaultdict(list)
        for place, uid in enumerate(uids):
            places[self.parts[writer][uid]].append(place)
        return dict(places)

    def _gathered(self, uids: Sequence[Uid], writer: str) -> Rows:
        found, order = [], []
        for part, places in self._by_part(uids, writer).items():
            found.append(part.index.take([part.rows[uids[place]] for place in places]))
            order += places
        return in_order(Rows.cat(found), order)


def in_order(rows: Rows, places: Sequence[int]) -> Rows:
    """Rows that stand for these places, from the first place to the last."""
    if list(places) == sorted(places):
        return rows
    return rows.take(sorted(range(len(places)), key=places.__getitem__))

"""What the driver holds of a table: index columns, and for each row where its payload lies.

rows        0 1 2 3 4 5                       index columns that have arrived are here, by value
generate    a a a b b b      a, b: chunks     what one worker wrote in one call, kept there under a number
verify      c c c d d d                       (chunk, row in it) for each row of the table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums


@dataclass(eq=False)
class Chunk:
    """What a worker writes in one call: `writes` as its stage declares it.

    `answer` is the call's future. Once it is there, `columns` names the payload that the worker keeps and `index` is the rest.
    """

    worker: int
    key: int
    size: int
    answer: Any
    writes: tuple[str, ...]
    work: Any = None
    columns: tuple[str, ...] | None = None
    index: Rows | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """Where the columns of one stage are: for each row a chunk by number (B,), -1 where it has none, and a row in it (B,)."""

    chunks: tuple[Chunk, ...]
    chunk: Tensor
    row: Tensor

    @staticmethod
    def of(size: int, parts: Sequence[tuple[Tensor, Chunk]]) -> Layer:
        """From the rows (positions, ascending or not) that each chunk holds, in its order."""
        chunk, row = torch.full((size,), -1), torch.zeros(size, dtype=torch.int64)
        for number, (positions, _) in enumerate(parts):
            chunk[positions] = number
            row[positions] = torch.arange(len(positions))
        return Layer(tuple(c for _, c in parts), chunk, row)

    def take(self, rows: Tensor) -> Layer:
        return Layer(self.chunks, self.chunk[rows], self.row[rows])

    def pieces(self) -> list[tuple[Chunk, Tensor, Tensor]]:
        """Each chunk that rows lie in, with their numbers in it and their positions in the table."""
        found = []
        for number in self.chunk.unique().tolist():
            if number >= 0:
                positions = (self.chunk == number).nonzero().flatten()
                found.append((self.chunks[number], self.row[positions], positions))
        return found

    def writes_any(self, names: frozenset[str]) -> bool:
        """True if a chunk has, or will have, one of these columns."""
        return any(not names.isdisjoint((*chunk.writes, *(chunk.columns or ()))) for chunk in self.chunks)

    def holds_any(self, names: frozenset[str]) -> bool:
        """True if a chunk that is here has one of these columns as payload."""
        return any(not names.isdisjoint(chunk.columns or ()) for chunk in self.chunks)

    @staticmethod
    def cat(layers: Sequence[Layer | None], sizes: Sequence[int]) -> Layer:
        """Of several tables joined; None for one of them that does not have the layer."""
        chunks: list[Chunk] = []
        numbers, rows = [], []
        for layer, size in zip(layers, sizes, strict=True):
            found = layer or Layer((), torch.full((size,), -1), torch.zeros(size, dtype=torch.int64))
            numbers.append(torch.where(found.chunk >= 0, found.chunk + len(chunks), found.chunk))
            rows.append(found.row)
            chunks += found.chunks
        return Layer(tuple(chunks), torch.cat(numbers), torch.cat(rows))


@dataclass(eq=False)
class Deferred:
    """A compute stage that nobody has needed yet. `done` is what it wrote, once it has been: where, or index columns themselves."""

    stage: Stage
    iteration: int
    sums: Sums
    done: Layer | Mapping[str, Column] | None = None


@dataclass(eq=False)
class Handle:
    """A table whose rows are elsewhere. `deferred` are compute stages that run when somebody needs what they write.

    `unresolved` names the layers whose index columns have not been waited for. What is asked of a handle never changes; what of it
    is here already does, by `settle`.
    """

    size: int
    index: Rows
    layers: Mapping[str, Layer] = field(default_factory=dict)
    unresolved: frozenset[str] = frozenset()
    deferred: tuple[Deferred, ...] = ()

    def __len__(self) -> int:
        return self.size

    def take(self, positions: Sequence[int] | Tensor) -> Handle:
        """The named rows, in the order given."""
        rows = torch.as_tensor(positions, dtype=torch.int64)
        layers = {name: layer.take(rows) for name, layer in self.layers.items()}
        deferred = tuple(Deferred(put_off.stage, put_off.iteration, put_off.sums) for put_off in self.deferred)
        return Handle(len(rows), self.index.take(rows), layers, self.unresolved, deferred)

    @staticmethod
    def cat(tables: Sequence[Handle]) -> Handle:
        """The rows of all tables, of which nothing is deferred or unresolved."""
        sizes = [len(table) for table in tables]
        names = dict.fromkeys(name for table in tables for name in table.layers)
        layers = {name: Layer.cat([table.layers.get(name) for table in tables], sizes) for name in names}
        return Handle(sum(sizes), Rows.cat([table.index for table in tables]), layers)

    def with_layer(self, name: str, layer: Layer) -> Handle:
        """With what a stage is writing."""
        return Handle(self.size, self.index, {**self.layers, name: layer}, self.unresolved | {name}, self.deferred)

    def with_index(self, columns: Mapping[str, Column], resolved: Iterable[str] = ()) -> Handle:
        """With index columns that have arrived, and so with fewer layers to wait for."""
        waiting = self.unresolved - set(resolved)
        return Handle(self.size, self.index.with_columns(columns), self.layers, waiting, self.deferred)

    def waiting_for(self, names: frozenset[str] | None = None) -> list[str]:
        """Unresolved layers that write one of `names` (or any), in order, with those that wrote an earlier version of it."""
        wanted = set(names or ())
        found = []
        for name, layer in reversed(list(self.layers.items())):
            if name in self.unresolved and (names is None or layer.writes_any(frozenset(wanted))):
                found.append(name)
                wanted |= {column for chunk in layer.chunks for column in chunk.writes}
        return found[::-1]

    def settle(self, other: Handle) -> None:
        """Takes over what `other`, the same table, knows more."""
        self.index, self.layers = other.index, other.layers
        self.unresolved, self.deferred = other.unresolved, other.deferred

    def deferring(self, *stages: Deferred) -> Handle:
        """With these stages still to be run, in place of those that were."""
        return Handle(self.size, self.index, self.layers, self.unresolved, stages)


def merged_column(size: int, segments: Sequence[tuple[Tensor, Column]]) -> Column | None:
    """One column of `size` rows from segments (positions, values), of which later ones win; None where a row is in none."""
    if len(segments) == 1 and torch.equal(segments[0][0], torch.arange(size)):
        # All rows in their order, as where one worker has written what another one gets.
        return segments[0][1] if size else None
    place = torch.full((size,), -1)
    start = 0
    for positions, column in segments:
        place[positions] = torch.arange(start, start + len(column))
        start += len(column)
    if size == 0 or bool((place < 0).any()):
        return None
    whole: Column = Rows.cat([Rows({"": column}) for _, column in segments])[""]
    return Rows({"": whole}).take(place)[""]

"""The rows that one worker is given: index columns by value, payload by where it lies; and how the worker gets them together.

driver: Handle ──take, part_of──▶ Part ──▶ worker: fetch its rows from each producer ──assemble──▶ Rows
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braidrl.data.codec import decode, encode
from braidrl.data.frames import join, split
from braidrl.data.rows import Column, Rows
from braidrl.flow import Stage
from braidrl.runtimes.hybrid.handle import Handle, merged_column

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a worker says of a call: index columns of the rows, names of the others, metric sums, seconds, and what it returns."""

    index: bytes = b""
    columns: tuple[str, ...] = ()
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    result: Any = None

    def packed(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def of(packed: bytes) -> Answer:
        """From `packed`, which came from a worker of this run."""
        answer = pickle.loads(packed)
        assert isinstance(answer, Answer)
        return answer

    def rows(self) -> Rows:
        return as_rows(self.index)


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of one chunk: `rows` in it, at `positions` of the part. `answer` is a number among the call's, where it was still awaited."""

    worker: int
    key: int
    rows: Numbers
    positions: Numbers
    columns: tuple[str, ...] | None
    answer: int | None


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a table, for one worker."""

    size: int
    index: bytes
    layers: tuple[tuple[Piece, ...], ...]

    def __len__(self) -> int:
        return self.size

    def uids(self) -> list[tuple[int, int, int]]:
        return as_rows(self.index).uids() if self.size else []


def part_of(table: Handle, awaited: list[Any], names: frozenset[str] | None = None) -> Part:
    """The whole table as a part, with the layers that have one of the columns `names` (all of them for None).

    Futures of answers that are not here yet are added to `awaited`.
    """
    packed = []
    for name, layer in table.layers.items():
        if names is not None and not layer.writes_any(names):
            continue
        pieces = []
        for chunk, rows, positions in layer.pieces():
            answer = None
            if name in table.unresolved:
                answer = len(awaited)
                awaited.append(chunk.answer)
            pieces.append(Piece(chunk.worker, chunk.key, rows.numpy(), positions.numpy(), chunk.columns, answer))
        packed.append(tuple(pieces))
    return Part(len(table), packed_rows(table.index), tuple(packed))


Fetch = Callable[[int, int, Numbers, tuple[str, ...]], Any]
"""Begins to fetch columns of rows of a worker's chunk."""


def assemble(
    part: Part, answers: Sequence[Answer], names: Collection[str] | None, fetch: Fetch, wait: Callable[[list[Any]], Any]
) -> Rows:
    """All index columns of a part and the payload columns among `names` (all of them for None), in the part's order."""
    segments: dict[str, list[tuple[Tensor, Column]]] = {}
    whole = torch.arange(part.size)
    for name, column in as_rows(part.index).items():
        segments[name] = [(whole, column)]
    begun: list[tuple[Piece, Any]] = []
    for piece in (piece for layer in part.layers for piece in layer):
        columns = piece.columns
        if piece.answer is not None:
            answer = answers[piece.answer]
            columns = answer.columns
            add(segments, piece, answer.rows().take(torch.from_numpy(piece.rows)))
        wanted = tuple(name for name in columns or () if names is None or name in names)
        if wanted:
            begun.append((piece, fetch(piece.worker, piece.key, piece.rows, wanted)))
    for (piece, _), rows in zip(begun, wait([future for _, future in begun]), strict=True):
        add(segments, piece, rows)
    merged = {name: merged_column(part.size, found) for name, found in segments.items()}
    return Rows({name: column for name, column in merged.items() if column is not None})


def add(segments: dict[str, list[tuple[Tensor, Column]]], piece: Piece, rows: Rows) -> None:
    for name, column in rows.items():
        segments.setdefault(name, []).append((torch.from_numpy(piece.positions), column))


def columns_read(stage: Stage) -> frozenset[str]:
    """Every column that a stage may read."""
    signature = stage.signature
    choices = (name for several in signature.one_of for name in several)
    return frozenset((*signature.reads, *signature.optional, *choices))


def packed_rows(rows: Rows) -> bytes:
    return bytes(join(encode(rows)))


def as_rows(packed: bytes) -> Rows:
    return decode(split(packed)) if packed else Rows({})

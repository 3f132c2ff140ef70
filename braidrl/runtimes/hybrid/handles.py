"""The five types that carry rows: three that the driver holds, and two that travel. None of them has payload.

Handle    a table of the driver; never changes     rows        0 1 2 3 4 5     for each output the row of it that a row has
Output    what one stage writes for a table        generate    a a a b b b     deferred, then under way, then there
Future    a, b: a call on one worker               verify      c c c d d d
Part      the rows that a worker is given: index columns by value, payload by where it lies, for each stage that wrote some
CallResult    what the worker replies: index columns by value, the names of the payload columns that it keeps
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import IDENTITY, Rows, merged_rows
from braidrl.flow import Kind, Stage
from braidrl.flow.stage import Signature
from braidrl.observe.metrics import Sums

Numbers = NDArray[np.int64]
RESPONSE = ("tokens", "rollout_log_probs", "rollout_versions", "finish_reason", "prompt_length")
READ = Stage("read", "read", None, Signature(Kind.COMPUTE))
"""In the place of a stage, for rows that are read."""


@dataclass(frozen=True, eq=False)
class CallResult:
    """What a worker replies to a call: index columns of the rows, names of the payload that it keeps under a key, and a result."""

    index: bytes = b""
    columns: tuple[str, ...] = ()
    worker: int = -1
    key: int = -1
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    result: Any = None


Kept = tuple[int, tuple[str, ...] | None, Numbers, Numbers]
"""Where what one stage wrote lies: the key under which workers keep it, its payload columns (None where the answers that come with the
call name them, none where all columns are meant), and of each row (B,) the worker, -1 where there is none, and the row's number there."""


def by_worker(workers: Numbers, rows: Numbers) -> Iterator[tuple[int, Numbers, Tensor]]:
    """Yield each worker that keeps some of the rows, with its numbers of them (n,) and their places here (n,)."""
    for worker in np.unique(workers[workers >= 0]).tolist():
        places = (workers == worker).nonzero()[0]
        yield worker, rows[places], torch.from_numpy(places)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a table for one worker: index columns by value, and where their payload lies.

    Where it is `together` all ranks of the pool give each other what they need of the table by their process group.
    """

    size: int = 0
    index: bytes = b""
    kept: tuple[Kept, ...] = ()
    together: bool = False

    def __len__(self) -> int:
        return self.size

    def uids(self) -> list[tuple[int, int, int]]:
        """Return (source, group, sample) of each row; nothing where the index has no such columns."""
        index = unpack_rows(self.index)
        return index.uids() if "group" in index else []


@dataclass(eq=False)
class Future:
    """A call under way on one worker: Ray's reference, the worker's number and name, what it does, on which rows."""

    ref: Any
    worker: int
    who: str
    what: str
    part: Part = Part()
    answer: CallResult | None = None


@dataclass(eq=False)
class Output:
    """What one stage writes for the rows of a table (B): deferred until it is begun, then under way, and there once it has an index.

    `future` (B,) says which of the futures writes a row, and `row` (B,) which row it is there.
    """

    stage: Stage
    table: "Handle | None" = None
    iteration: int = 0
    sums: Sums = field(default_factory=Sums)
    group: Any = None
    futures: Sequence[Future] = ()
    future: Tensor = field(default_factory=lambda: torch.zeros(0))
    row: Tensor = field(default_factory=lambda: torch.zeros(0))
    index: Rows | None = None
    key: int = -1
    """Under which the workers keep it."""
    workers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The worker of each future."""
    payload: frozenset[str] = frozenset()
    """The payload columns that the workers keep, once they have said so."""

    @property
    def deferred(self) -> bool:
        return self.index is None and not self.futures

    def begin(self, key: int, group: Any, futures: Sequence[Future], positions: Sequence[Sequence[int]]) -> None:
        """Note who computes which rows, and keeps them under which key: `positions` are those of each future, in its order."""
        self.table, self.key, self.group, self.futures = None, key, group, futures
        self.workers = torch.tensor([future.worker for future in futures])
        size = sum(map(len, positions))
        self.future, self.row = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        for number, rows in enumerate(positions):
            place = torch.as_tensor(rows, dtype=torch.int64)
            self.future[place], self.row[place] = number, torch.arange(len(place))

    def finish(self, answers: Sequence[CallResult]) -> None:
        """Note what the futures have brought."""
        self.payload = frozenset(column for answer in answers for column in answer.columns)
        size = len(self.future)
        arrived = {future: unpack_rows(answer.index) for future, answer in zip(self.futures, answers, strict=True)}
        pieces = self.pieces(torch.arange(size))
        self.index = merged_rows(size, [(positions, arrived[future].take(rows)) for future, rows, positions in pieces])

    def pieces(self, rows: Tensor) -> list[tuple[Future, Tensor, Tensor]]:
        """Return each future that writes some of these rows (-1: none), with their rows there (n,) and places in `rows` (n,)."""
        if not self.futures:
            return []
        places = (rows >= 0).nonzero().flatten()
        number, row = self.future[rows[places]], self.row[rows[places]]
        return [(self.futures[n], row[number == n], places[number == n]) for n in number.unique().tolist()]

    def kept(self, rows: Tensor, awaited: list[Future]) -> Iterator[Kept]:
        """Yield where the payload of some rows (-1: none) lies; appends the futures that their reader has to wait for."""
        places = (rows >= 0).nonzero().flatten()
        future = self.future[rows[places]]
        found: dict[tuple[str, ...] | None, list[int]] = {}
        for number in future.unique().tolist():
            answer = self.futures[number].answer if self.index is not None else None
            awaited += [] if answer else [self.futures[number]]
            found.setdefault(answer.columns if answer else None, []).append(number)
        for columns, numbers in found.items():
            own = places[torch.isin(future, torch.tensor(numbers))]
            of_row = torch.full((len(rows),), -1)
            of_row[own] = self.workers[self.future[rows[own]]]
            there = torch.zeros(len(rows), dtype=torch.int64)
            there[own] = self.row[rows[own]]
            yield self.key, columns, of_row.numpy(), there.numpy()

    def holds(self, names: frozenset[str] | None) -> bool:
        """Return True if one of these columns is payload of this output, or may be while it is under way; for None, if workers keep any."""
        if names is None:
            return bool(self.futures)
        return not names.isdisjoint(self.payload if self.index is not None else self.stage.writes)


@dataclass(frozen=True, eq=False)
class Handle:
    """A table whose rows lie with workers: outputs in the order of their stages, and for each the row that a row has there.

    `rows` is (outputs, B), -1 where a row has none. `parts` are the rows of each rank, where somebody has decided that.
    """

    outputs: tuple[Output, ...]
    rows: Tensor
    parts: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return self.rows.shape[1]

    @property
    def index(self) -> Rows:
        """Return the index columns that have arrived; later outputs win."""
        segments = []
        for output, rows in zip(self.outputs, self.rows, strict=True):
            if output.index is not None:
                places = (rows >= 0).nonzero().flatten()
                segments.append((places, output.index.take(rows[places])))
        return merged_rows(len(self), segments)

    @property
    def columns(self) -> set[str]:
        """Return the names of the columns that the rows have, or get by what is under way."""
        found = {name for output in self.outputs for name in (*output.stage.writes, *output.payload)}
        return found | {name for output in self.outputs if output.index is not None for name in output.index}

    def take(self, positions: Sequence[int]) -> "Handle":
        """Return the rows at these positions, in the order given."""
        rows = self.rows[:, torch.as_tensor(positions, dtype=torch.int64)]
        # An output that no row is left of would keep its rows with the workers.
        used = [n for n, own in enumerate(rows) if not len(own) or bool((own >= 0).any())]
        return Handle(tuple(self.outputs[n] for n in used), rows[used])

    @staticmethod
    def cat(tables: "Sequence[Handle]") -> "Handle":
        """Return the rows of all tables, one table after the other."""
        numbers = {o: n for n, o in enumerate(dict.fromkeys(o for table in tables for o in table.outputs))}
        rows, start = torch.full((len(numbers), sum(map(len, tables))), -1), 0
        for table in tables:
            rows[[numbers[output] for output in table.outputs], start : start + len(table)] = table.rows
            start += len(table)
        return Handle(tuple(numbers), rows)

    def divide(self, parts: int) -> "list[Handle]":
        """Return the rows of each rank: those decided on, else equally many neighbours."""
        if self.parts is not None:
            return [self.take(positions) for positions in self.parts]
        edges = [len(self) * n // parts for n in range(parts + 1)]
        return [self.take(range(edges[n], edges[n + 1])) for n in range(parts)]

    def with_output(self, output: Output) -> "Handle":
        """Return the same rows with what a stage writes for them."""
        return Handle((*self.outputs, output), torch.cat([self.rows, torch.arange(len(self))[None]]))

    def without(self, other: "Handle") -> "Handle":
        """Return the same rows with what the other table lacks."""
        added = [n for n, output in enumerate(self.outputs) if output not in other.outputs]
        return Handle(tuple(self.outputs[n] for n in added), self.rows[added])

    def writers(self, names: Collection[str]) -> list[Output]:
        """Return the outputs that write one of these columns or, earlier, another column of such an output."""
        wanted, found = set(names), list[Output]()
        for output in reversed(self.outputs):
            if not wanted.isdisjoint(output.stage.writes):
                found.append(output)
                wanted.update(output.stage.writes)
        return found[::-1]

    def workers(self, outputs: Iterable[Output]) -> list[int]:
        """Return for each row the worker that computes it in the first of these outputs that has it; -1 for none."""
        found = torch.full((len(self),), -1)
        for output in outputs:
            for future, _, places in output.pieces(self.rows[self.outputs.index(output)]):
                found[places] = torch.where(found[places] < 0, future.worker, found[places])
        return found.tolist()

    def holders(self, reads: frozenset[str] | None = None) -> set[int]:
        """Return the workers that keep payload of the rows, of the columns that are read or of all."""
        held = [(output, own) for output, own in zip(self.outputs, self.rows, strict=True) if output.holds(reads)]
        return {future.worker for output, own in held for future, _, _ in output.pieces(own)}

    def part(self, awaited: list[Future], reads: frozenset[str] | None = None, together: bool = False) -> Part:
        """Return the table as a worker is given it.

        Args:
            awaited: Futures whose answers have to come with the call; those of this table are appended.
            reads: Columns that the worker needs beside the rows' identity and length; by default all, and of those none by value that
                workers keep.
            together: True where all ranks of its pool exchange rows.
        """
        if not len(self):
            return Part(together=together)
        held = [(output, own) for output, own in zip(self.outputs, self.rows, strict=True) if output.holds(reads)]
        kept = tuple(each for output, own in held for each in output.kept(own, awaited))
        index = self.index
        if reads is None:
            kept = tuple((key, (), workers, there) for key, _, workers, there in kept)
            computed_here = {
                name for output in self.outputs if not output.futures and output.index for name in output.index
            }
            return Part(len(self), pack_rows(index.only(sorted(computed_here))), kept, together)
        needed = [name for name in index if name in reads or name in (*IDENTITY, "length")]
        return Part(len(self), pack_rows(index.only(needed)), kept, together)


def assemble(
    part: Part,
    answers: Sequence[CallResult],
    reads: frozenset[str] | None,
    fetch: Callable[[int, int, Numbers, tuple[str, ...]], Any],
    wait: Callable[[list[Any]], list[Rows]],
) -> Rows:
    """Return the rows of a part with the index columns that it has, and the payload that is read.

    Args:
        part: What the worker was given.
        answers: The answers that came with the call.
        reads: Names of columns; all for None, also those that are no payload.
        fetch: Begins to fetch rows by worker, key, row numbers and columns.
        wait: Returns what was fetched once all of it is here; called also where there is nothing, for the sake of others.
    """
    if not part.size:
        wait([])
        return Rows({})
    given, segments, begun = (torch.arange(part.size), unpack_rows(part.index)), [], []
    came = {(answer.worker, answer.key): answer for answer in answers}
    for key, known, workers, numbers in part.kept:
        for worker, rows, places in by_worker(workers, numbers):
            columns = known
            if columns is None:
                answer = came[worker, key]
                columns = answer.columns
                segments.append((places, unpack_rows(answer.index).take(torch.from_numpy(rows))))
            wanted = () if reads is None else tuple(name for name in columns if name in reads)
            if wanted or reads is None:
                begun.append((places, fetch(worker, key, rows, wanted)))
    fetched = wait([future for _, future in begun])
    came_later = segments + [(places, rows) for (places, _), rows in zip(begun, fetched, strict=True)]
    # Of all columns those that the driver has computed are the last word; else what is under way comes after what was given.
    return merged_rows(part.size, [*came_later, given] if reads is None else [given, *came_later])


def columns_read(stage: Stage) -> frozenset[str]:
    """Return every column that a stage may read."""
    signature = stage.signature
    if stage.kind is Kind.GENERATE:
        # Responses of an earlier iteration may go on.
        return frozenset((*signature.reads, *RESPONSE))
    return frozenset((*signature.reads, *signature.optional, *sum(signature.one_of, ())))

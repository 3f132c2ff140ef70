"""The five types that carry rows: three in the driver, and two messages. None of them has payload.

Handle    a table of the driver; immutable         rows        0 1 2 3 4 5     the row number of each row in an output
Output    columns that one stage writes            generate    a a a b b b     deferred, then running, then complete
Future    a, b: a call on one worker               verify      c c c d d d
Part      rows for a worker: index columns by value, payload by its location, for each stage that wrote some
CallResult    a worker's reply: index columns by value, and the names of the payload columns that it keeps
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.packing import equal_share
from braidrl.data.rows import IDENTITY, Rows, merged_rows
from braidrl.data.token_columns import returned_columns
from braidrl.flow import Kind, Stage
from braidrl.flow.signatures import columns_of
from braidrl.observe.metrics import Sums

Numbers = NDArray[np.int64]
RESPONSE = ("tokens", "finish_reason", "prompt_length")
EPISODE = ("action_mask", "sequence_lengths")
READ = Stage("read", "read", None, kind=Kind.COMPUTE)
"""Stage name of rows that are read."""


@dataclass(frozen=True, eq=False)
class CallResult:
    """A worker's reply to a call: index columns, names of the payload kept under a key, and a result."""

    index: bytes = b""
    columns: tuple[str, ...] = ()
    worker: int = -1
    key: int = -1
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    result: Any = None


Kept = tuple[int, tuple[str, ...] | None, Numbers, Numbers]
"""The location of one stage's output: the key under which workers keep it; its payload columns (None if the attached
answers name them); and for each row (B,) the worker, -1 for none, and the row's number there.
"""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a table for one worker: index columns by value, and the location of their payload."""

    size: int = 0
    index: bytes = b""
    kept: tuple[Kept, ...] = ()

    def __len__(self) -> int:
        return self.size

    def uids(self) -> list[tuple[int, int, int]]:
        """Return (source, group, sample) of each row; empty if the index has no such columns."""
        index = unpack_rows(self.index)
        return index.uids() if "group" in index else []


@dataclass(eq=False)
class Future:
    """A running call on one worker: Ray's reference, the worker's number and name, the method, and the rows."""

    ref: Any
    worker: int
    who: str
    what: str
    part: Part = Part()


@dataclass(eq=False)
class Output:
    """The columns that one stage writes for a table (B): deferred at first, then running, complete once it has an
    index.

    `worker` (B,) is the worker that writes each row, one future for each, and `row` (B,) the row's number there.
    """

    stage: Stage
    table: "Handle | None" = None
    iteration: int = 0
    sums: Sums = field(default_factory=Sums)
    group: Any = None
    futures: Sequence[Future] = ()
    worker: Tensor = field(default_factory=lambda: torch.zeros(0))
    row: Tensor = field(default_factory=lambda: torch.zeros(0))
    index: Rows | None = None
    key: int = -1
    """The key under which workers keep it."""
    payload: frozenset[str] = frozenset()
    """Payload columns that the workers keep, known after their answers."""

    def begin(self, key: int, group: Any, futures: Sequence[Future], positions: Sequence[Sequence[int]]) -> None:
        """Record the calls, the key, and the row positions of each future; without references its rows are unread."""
        self.table, self.key, self.group, self.futures = None, key, group, futures
        size = sum(map(len, positions))
        self.worker, self.row = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        for future, rows in zip(futures, positions, strict=True):
            positions_of_call = torch.as_tensor(rows, dtype=torch.int64)
            self.worker[positions_of_call], self.row[positions_of_call] = (
                future.worker,
                torch.arange(len(positions_of_call)),
            )
            weakref.finalize(future, group.unread.append, (future.worker, key)).atexit = False

    def finish(self, answers: Sequence[CallResult]) -> None:
        """Record the answers, whose index columns become those of the output; those that a row lacks are left out."""
        self.payload = frozenset(column for answer in answers for column in answer.columns)
        tables = [unpack_rows(answer.index) for answer in answers]
        filled = [table for table in tables if len(table)]
        self.index = Rows({})
        if sum(map(len, filled)) != len(self.worker):
            return
        # Row i is row first[worker] + row of the workers' tables, one after the other.
        first = torch.zeros(1 + max((future.worker for future in self.futures), default=0), dtype=torch.int64)
        ends = list(accumulate(map(len, tables), initial=0))
        first[[future.worker for future in self.futures]] = torch.tensor(ends[:-1], dtype=torch.int64)
        names = [name for name in filled[0] if all(name in table for table in filled)] if filled else []
        together = Rows.cat([table.only(names) for table in filled])
        self.index = together.take(first[self.worker] + self.row) if names else together

    @cached_property
    def future_of(self) -> dict[int, Future]:
        """Return the call of each worker."""
        return {future.worker: future for future in self.futures}

    def holds(self, names: frozenset[str] | None) -> bool:
        """Return True if a named column is, or while running may become, payload of this output; for None, if workers
        keep any.
        """
        if names is None:
            return bool(self.futures)
        return not names.isdisjoint(self.payload if self.index is not None else self.stage.writes)


@dataclass(frozen=True, eq=False)
class Handle:
    """A table whose rows are on workers: outputs in the order of their stages, and the number of each row in each
    output.

    `rows` is (outputs, B), -1 if a row is not in an output. `parts` holds the rows of each rank, once they are
    assigned. `known` is set for the rows of one rank.
    """

    outputs: tuple[Output, ...]
    rows: Tensor
    parts: Sequence[Sequence[int]] | None = None
    known: "Located | None" = None

    def __len__(self) -> int:
        return self.rows.shape[1]

    @property
    def index(self) -> Rows:
        """Return the index columns that have arrived; later outputs take precedence."""
        segments = []
        for output, rows in zip(self.outputs, self.rows, strict=True):
            if output.index is not None:
                positions = (rows >= 0).nonzero().flatten()
                segments.append((positions, output.index.take(rows[positions])))
        return merged_rows(len(self), segments)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the rows' columns, including those of running calls."""
        names = {name for output in self.outputs for name in (*output.stage.writes, *output.payload)}
        return iter(names | {name for output in self.outputs if output.index is not None for name in output.index})

    def take(self, positions: Sequence[int]) -> "Handle":
        rows = self.rows[:, torch.as_tensor(positions, dtype=torch.int64)]
        # An unused output would keep its rows on the workers.
        used = [n for n, numbers in enumerate(rows) if not len(numbers) or bool((numbers >= 0).any())]
        return Handle(tuple(self.outputs[n] for n in used), rows[used])

    @staticmethod
    def cat(tables: "Sequence[Handle]") -> "Handle":
        numbers = {o: n for n, o in enumerate(dict.fromkeys(o for table in tables for o in table.outputs))}
        rows, start = torch.full((len(numbers), sum(map(len, tables))), -1), 0
        for table in tables:
            rows[[numbers[output] for output in table.outputs], start : start + len(table)] = table.rows
            start += len(table)
        return Handle(tuple(numbers), rows)

    def divide(self, parts: int) -> "list[Handle]":
        """Return the rows of each rank: the assigned ones, otherwise equal shares of neighbouring rows."""
        shares = self.parts or [equal_share(len(self), number, parts) for number in range(parts)]
        # All ranks' rows are looked up together, and each rank's are a view.
        order = torch.tensor(list(chain.from_iterable(shares)), dtype=torch.int64)
        located, rows, numbers = self.located().take(order), self.rows[:, order], np.arange(len(self.outputs))
        written, start, handles = (rows >= 0).numpy(), 0, list[Handle]()
        for share in shares:
            end = start + len(share)
            # An unused output would keep its rows on the workers.
            used = numbers[written[:, start:end].any(1)] if share else numbers
            outputs = self.outputs if len(used) == len(numbers) else tuple(self.outputs[n] for n in used)
            known = located.part(used, start, end, arrived(outputs))
            handles.append(Handle(outputs, rows[used, start:end], None, known))
            start = end
        return handles

    def located(self) -> "Located":
        """Return the index columns that have arrived, and the location of the rows of every output."""
        if self.known is not None and self.known.arrived == arrived(self.outputs):
            return self.known
        workers = np.full((len(self.outputs), len(self)), -1)
        numbers, rows = np.zeros_like(workers), self.rows.numpy()
        for output, rows_of_output, its_workers, its_numbers in zip(self.outputs, rows, workers, numbers, strict=True):
            if output.futures:
                written = rows_of_output >= 0
                its_workers[written] = output.worker.numpy()[rows_of_output[written]]
                its_numbers[written] = output.row.numpy()[rows_of_output[written]]
        return Located(self.index, workers, numbers, arrived(self.outputs))

    def with_output(self, output: Output) -> "Handle":
        return Handle((*self.outputs, output), torch.cat([self.rows, torch.arange(len(self))[None]]))

    def writers(self, names: Collection[str]) -> list[Output]:
        """Return, in order, the outputs that write one of these columns, or a column that such one also writes."""
        needed, outputs = set(names), list[Output]()
        for output in reversed(self.outputs):
            if not needed.isdisjoint(output.stage.writes):
                outputs.append(output)
                needed.update(output.stage.writes)
        return outputs[::-1]

    def part(self, awaited: list[Future], reads: frozenset[str] | None = None) -> Part:
        """Return the table as a worker receives it; append to `awaited` the futures whose answers the call needs.

        `reads` are the columns that the worker needs in addition to identity and length; by default all. Without them,
        columns that workers keep are not sent by value.
        """
        if not len(self):
            return Part()
        kept, located = list[Kept](), self.located()
        for output, workers, numbers in zip(self.outputs, located.workers, located.numbers, strict=True):
            if not output.holds(reads):
                continue
            columns = None
            if output.index is None:
                awaited += [output.future_of[worker] for worker in np.unique(workers[workers >= 0]).tolist()]
            else:
                columns = tuple(sorted(output.payload if reads is None else output.payload & reads))
            kept.append((output.key, columns, workers, numbers))
        index = located.index
        if reads is None:
            computed = [output.index for output in self.outputs if output.index and not output.futures]
            names = sorted({name for columns in computed for name in columns})
        else:
            names = [name for name in index if name in reads or name in (*IDENTITY, "length")]
        return Part(len(self), pack_rows(index.only(names)), tuple(kept))


@dataclass(frozen=True, eq=False)
class Located:
    """Rows as workers receive them: index columns (B), and for each output (outputs, B) the worker of every row, -1 for
    none, and the row's number there.
    """

    index: Rows
    workers: Numbers
    numbers: Numbers
    arrived: int
    """The number of outputs with index columns."""

    def take(self, order: Tensor) -> "Located":
        """Return rows by position."""
        positions = order.numpy()
        workers, numbers = self.workers[:, positions], self.numbers[:, positions]
        return Located(self.index.take(order), workers, numbers, self.arrived)

    def part(self, outputs: Numbers, start: int, end: int, arrived: int) -> "Located":
        """Return the rows from one position to another of some outputs, of which `arrived` have index columns."""
        workers, numbers = self.workers[outputs, start:end], self.numbers[outputs, start:end]
        return Located(self.index.part(start, end), workers, numbers, arrived)


def arrived(outputs: Sequence[Output]) -> int:
    """Return the number of outputs whose index columns have arrived."""
    return sum(output.index is not None for output in outputs)


def columns_read(stage: Stage) -> frozenset[str]:
    """Return every column that a stage may read."""
    if stage.kind is Kind.GENERATE:
        # Responses and episodes of an earlier iteration may resume.
        returned = [column.name for column in returned_columns(columns_of(stage))]
        episode = EPISODE if "environment" in stage.params else ()
        return frozenset((*stage.reads, *stage.optional, *RESPONSE, *episode, *returned))
    return frozenset((*stage.reads, *stage.optional, *sum(stage.one_of, ())))

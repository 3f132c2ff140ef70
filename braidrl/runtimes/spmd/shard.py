"""A table sharded over ranks: index columns of all rows on every rank, payload of each row on one rank.

            index columns of all rows     owner      payload
rank 0      g0 g0 g1 g1                   0 0 1 1    tokens of rows 0, 1
rank 1      g0 g0 g1 g1                   0 0 1 1    tokens of rows 2, 3

gather      metric sums, added along a tree; new index columns, a few narrow numbers a row, on every rank
move        payload to its new ranks, between its senders and receivers
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from braidrl.cluster.world import World, bytes_of
from braidrl.data.codec import encode, unpack_rows
from braidrl.data.messages import join
from braidrl.data.packing import part_numbers
from braidrl.data.rows import Column, Rows, tokens_of
from braidrl.flow import Stage
from braidrl.flow.compute import added
from braidrl.observe.metrics import Sums, merged
from braidrl.observe.trace import Span, TraceWriter, traced
from braidrl.runtimes.interfaces import Interrupts
from braidrl.runtimes.isolation import can_isolate

LARGEST = 2**63 - 1
IN_PLACE = 1.1
"""Rows stay in place if the fullest rank then has at most this much more work than after the best partition."""


@dataclass(frozen=True)
class Shard:
    """One rank's view of a table of B rows.

    `index` holds the index columns of all rows and `owner` (B,) int64 the rank of each row's payload, both the same on
    every rank; `payload` holds the payload columns of this rank's rows, in the order of the table.
    """

    index: Rows
    owner: Tensor
    payload: Rows
    rank: int

    def __len__(self) -> int:
        """Return the number of rows on all ranks."""
        return len(self.owner)

    def __getitem__(self, name: str) -> Column:
        """Return a column of this rank's rows."""
        return self.rows[name]

    @cached_property
    def local_positions(self) -> Tensor:
        """Return the positions of this rank's rows."""
        return (self.owner == self.rank).nonzero().flatten()

    @cached_property
    def rows(self) -> Rows:
        """Return this rank's rows with every column."""
        index = self.index.take(self.local_positions)
        return index.with_columns(dict(self.payload.items())) if len(index) else index

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of this rank's columns; a rank without rows has no payload columns."""
        return iter([*self.index, *self.payload] if len(self.local_positions) else ())

    def with_columns(self, index: Rows, payload: Rows) -> "Shard":
        """Return the same rows with new index columns of all rows and new payload of this rank, if it has rows."""
        some = len(self.payload) or len(payload)
        new = self.payload.with_columns(dict(payload.items())) if some else Rows({})
        return replace(self, index=self.index.with_columns(dict(index.items())), payload=new)

    def take(self, positions: Sequence[int]) -> "Shard":
        if len(positions) == len(self) and list(positions) == list(range(len(self))):
            return self
        chosen = torch.as_tensor(positions, dtype=torch.int64)
        owner = self.owner[chosen]
        local_position = torch.zeros(len(self.owner), dtype=torch.int64)
        local_position[self.local_positions] = torch.arange(len(self.local_positions))
        payload = self.payload.take(local_position[chosen[owner == self.rank]])
        return Shard(self.index.take(chosen), owner, payload, self.rank)

    def renumbered(self, ranks: Mapping[int, int], rank: int) -> "Shard":
        """Return the table after ranks have new numbers; this one is now `rank`. Raises KeyError if the payload of a
        row was on a rank without one.
        """
        owner = torch.tensor([ranks[former] for former in self.owner.tolist()], dtype=torch.int64)
        return replace(self, owner=owner, rank=rank)

    @staticmethod
    def cat(tables: "Sequence[Shard]") -> "Shard":
        index, payload = Rows.cat([t.index for t in tables]), Rows.cat([t.payload for t in tables])
        return Shard(index, torch.cat([t.owner for t in tables]), payload, tables[0].rank)


class ShardExchange:
    """The collectives of a table in iteration `iteration`.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, world: World, interrupts: Interrupts, trace: TraceWriter | None) -> None:
        self.world, self.interrupts, self.trace = world, interrupts, trace
        # A single process has no ranks to wait for.
        self.waits = trace if world.size > 1 else None
        self.iteration = self.version = 0

    def move(self, edge: str, table: Shard, owner: Tensor, needed: Sequence[str] | None = None) -> Shard:
        """Return the table with each row's payload, or its columns `needed`, on rank `owner` (B,), by one message per
        pair of ranks.
        """
        rank, source, rows = self.world.rank, table.owner, table.payload
        if torch.equal(owner, source):
            return table
        if needed is not None:
            rows = rows.only([name for name in dict.fromkeys(needed) if name in rows])
        with traced(self.waits, "ranks", edge, self.iteration, state="waiting", version=self.version):
            receiver = owner[source == rank]
            messages = {
                to: join(encode(rows.take((receiver == to).nonzero().flatten())))
                for to in set(receiver.tolist()) - {rank}
            }
            senders = set(source[owner == rank].tolist()) - {rank}
            received = self.world.exchange(f"rows for {edge} of step {self.iteration}", messages, senders)
            parts = {sender: unpack_rows(message) for sender, message in received.items()}
            parts[rank] = rows.take((receiver == rank).nonzero().flatten())
            coming = [((source == sender) & (owner == rank)).nonzero().flatten() for sender in parts]
            moved = Rows.cat(list(parts.values())).take(torch.cat(coming).argsort())
        return replace(table, owner=owner, payload=moved)

    def gather(self, table: Shard, columns: Mapping[str, Column], local_sums: Sums, sums: Sums) -> Shard:
        """All-gather each rank's new columns and metric sums.

        Raises KeyboardInterrupt on every rank if one received a signal.
        """
        new = Rows(columns)
        report = StageReport(
            local_sums.pairs(),
            self.interrupts.stop_requested,
            {name: Form.of(column) for name, column in new.index.items()},
        )
        with traced(self.waits, "ranks", "index columns", self.iteration, state="waiting", version=self.version):
            report = self.world.reduce("sums and index columns", report, StageReport.of_both, StageReport)
            self.interrupts.agree(report.stop_requested)
            if report.differing:
                raise ValueError(f"ranks have made different index columns: {report.differing}")
            index = self._gathered(table.owner, new.index, report.forms)
        sums.merge(Sums(report.sums))
        return table.with_columns(index, new.payload)

    def _gathered(self, owner: Tensor, local: Rows, forms: "Mapping[str, Form]") -> Rows:
        """Return index columns of all rows from those of each rank's `local` rows."""
        size = self.world.size
        if not forms or size == 1:
            return local
        # A rank without rows learns the columns from the others.
        narrow = {name: form.narrowed(local.get(name)) for name, form in forms.items() if not form.is_constant}
        counts = torch.bincount(owner, minlength=size)
        gathered = self.world.gather_columns("index columns", narrow, counts)
        wide = {name: form.widened(gathered.get(name), len(owner)) for name, form in forms.items()}
        if bool((owner.diff() >= 0).all()):
            return Rows(wide)
        # Row i of the table is row order[i] in the order of ranks.
        order = owner.argsort(stable=True).argsort()
        return Rows({name: column[order] for name, column in wide.items()})

    def add_sums(self, purpose: str, local_sums: Sums, sums: Sums) -> None:
        """Add the metric sums of all ranks."""
        total = self.world.reduce(purpose, local_sums.pairs(), merged, dict[str, tuple[float, float]])
        sums.merge(Sums(total))

    def add_up(self, local_sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-reduce sums; a rank without rows has none."""
        as_rows = {name: total[None] for name, total in local_sums.items()}
        totals = self.world.reduce("sums over the batch", as_rows, added, dict[str, Tensor])
        return {name: total[0] for name, total in totals.items()}

    @contextmanager
    def working(self, stage: Stage, rows: Rows) -> Iterator[Span]:
        """Trace the work on rows, and name them if it fails."""
        uids = rows.uids() if "group" in rows else ()
        about = {"rows": len(rows), "tokens": tokens_of(rows), "version": self.version}
        with (
            traced(self.trace, stage.role or "compute", stage.name, self.iteration, **about) as done,
            self.world.supervised("what ranks compute together"),
            self.world.working(uids, may_end_rank=can_isolate(stage)),
        ):
            yield done


@dataclass(frozen=True)
class Form:
    """The type of an index column, the shape of its values, and their range if they are whole numbers, as the scores of
    most verifiers are.

    Without values `low` is above `high`.
    """

    dtype: str
    shape: tuple[int, ...]
    low: int = LARGEST
    high: int = -LARGEST
    is_whole: bool = True
    """True if all values are integers, also as floats."""

    @staticmethod
    def of(column: Column) -> "Form":
        """Return the form of a column on one rank."""
        assert isinstance(column, Tensor), "index columns are tensors"
        dtype, shape = str(column.dtype).removeprefix("torch."), tuple(column.shape[1:])
        if not column.numel():
            return Form(dtype, shape)
        integers = column.long()
        if column.is_floating_point() and not torch.equal(bytes_of(integers.to(column.dtype)), bytes_of(column)):
            return Form(dtype, shape, is_whole=False)
        low, high = integers.aminmax()
        return Form(dtype, shape, int(low), int(high))

    def of_both(self, other: "Form") -> "Form":
        """Return the common form of a column of two ranks' rows."""
        is_whole = self.is_whole and other.is_whole
        return replace(self, low=min(self.low, other.low), high=max(self.high, other.high), is_whole=is_whole)

    @property
    def is_constant(self) -> bool:
        """Return True if all rows of all ranks have the same integer."""
        return self.is_whole and self.low == self.high

    @property
    def sent_as(self) -> torch.dtype | None:
        """Return the narrowest type for the differences to the lowest integer of all ranks; None if the values are sent
        as they are.
        """
        kinds = () if self.dtype == "bool" or not self.is_whole or self.low > self.high else NARROW
        return next((kind for kind in kinds if self.high - self.low <= torch.iinfo(kind).max), None)

    def narrowed(self, column: Tensor | None) -> Tensor:
        """Return a column, or an empty one, as it is sent."""
        if column is None:
            column = torch.empty(0, *self.shape, dtype=getattr(torch, self.dtype))
        kind = self.sent_as
        return column if kind is None else (column.long() - self.low).to(kind)

    def widened(self, column: Tensor | None, rows: int) -> Tensor:
        """Return the column of all rows from what ranks have sent; constant columns are not sent."""
        dtype = getattr(torch, self.dtype)
        if column is None:
            return torch.full((rows, *self.shape), self.low, dtype=dtype)
        return column if self.sent_as is None else (column.long() + self.low).to(dtype)


NARROW = (torch.uint8, torch.uint16, torch.int32)


@dataclass(frozen=True)
class StageReport:
    """Metric sums of ranks after a stage, whether one of them received a signal, and the forms of new index columns."""

    sums: dict[str, tuple[float, float]]
    stop_requested: bool
    forms: dict[str, Form]
    differing: str = ""
    """The index columns of two ranks, if they differ; a rank without rows has none."""

    def of_both(self, other: "StageReport") -> "StageReport":
        """Return the combined report of two sets of ranks."""
        sums = merged(self.sums, other.sums)
        kinds = [{name: (form.dtype, form.shape) for name, form in report.forms.items()} for report in (self, other)]
        differing = self.differing or other.differing
        if all(kinds) and kinds[0] != kinds[1] and not (self.stop_requested or other.stop_requested):
            differing = differing or f"{kinds[0]} and {kinds[1]}"
        forms = dict(self.forms or other.forms)
        if all(kinds) and not differing:
            forms = {name: form.of_both(other.forms[name]) for name, form in self.forms.items()}
        return StageReport(sums, self.stop_requested or other.stop_requested, forms, differing)


def balanced_owners(costs: Tensor, owner: Tensor, ranks: int, groups: Tensor | None = None) -> Tensor:
    """Return each row's rank (B,): `owner` if it is balanced enough, otherwise the result of the partition function.

    `costs`, `owner` and `groups` are (B,) int64. Rows of one of `groups` stay together. Parts are assigned from the
    largest, each to the rank that already has most of it.
    """
    together = groups is None or len(groups.unique()) == len((groups * ranks + owner).unique())
    fullest = float(torch.bincount(owner, costs.double(), minlength=ranks).max())
    ideal = max(float(costs.sum()) / ranks, float(costs.max())) if len(costs) else 0.0
    if together and fullest <= IN_PLACE * ideal:
        # No partition is better than the ideal one.
        return owner
    cost_of = costs.numpy()
    part_of = part_numbers(cost_of, ranks, None if groups is None else groups.numpy())
    if together and fullest <= IN_PLACE * np.bincount(part_of, cost_of).max():
        return owner
    # The share of a part that each rank already has, largest first.
    pairs, pair_of_row = np.unique(part_of * ranks + owner.numpy(), return_inverse=True)
    here = np.bincount(pair_of_row, cost_of)
    rank_of, taken = dict[int, int](), set[int]()
    for pair in pairs[np.lexsort((pairs, -here, pairs // ranks))].tolist():
        number, rank = divmod(pair, ranks)
        if number not in rank_of and rank not in taken:
            rank_of[number] = rank
            taken.add(rank)
    unused = (rank for rank in range(ranks) if rank not in taken)
    target = np.array([rank_of[number] if number in rank_of else next(unused) for number in range(ranks)])
    return torch.from_numpy(target[part_of])

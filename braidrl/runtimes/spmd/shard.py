"""A table sharded over ranks: index columns of all rows on every rank, payload of each row on one rank.

            index columns of all rows     owner      payload
rank 0      g0 g0 g1 g1                   0 0 1 1    tokens of rows 0, 1
rank 1      g0 g0 g1 g1                   0 0 1 1    tokens of rows 2, 3

gather      new index columns and metric sums of every rank, on every rank
move        payload to its new ranks
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.data.codec import encode, pack_rows, unpack_rows
from braidrl.data.messages import join
from braidrl.data.packing import balanced_partition, imbalance
from braidrl.data.rows import Column, Rows, named_rows, tokens_of
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import Span, TraceWriter, traced
from braidrl.runtimes.interfaces import Interrupts

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

    @property
    def mine(self) -> Tensor:
        return (self.owner == self.rank).nonzero().flatten()

    @property
    def rows(self) -> Rows:
        """Return this rank's rows with every column."""
        own = self.index.take(self.mine)
        return own.with_columns(dict(self.payload.items())) if len(own) else own

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of this rank's columns; a rank without rows does not know the payload's."""
        return iter([*self.index, *self.payload] if len(self.mine) else ())

    def with_columns(self, index: Rows, payload: Rows) -> "Shard":
        """Return the same rows with new index columns of all rows, and new payload of this rank's; a rank without rows
        has none.
        """
        some = len(self.payload) or len(payload)
        new = self.payload.with_columns(dict(payload.items())) if some else Rows({})
        return replace(self, index=self.index.with_columns(dict(index.items())), payload=new)

    def take(self, positions: Sequence[int]) -> "Shard":
        chosen = torch.tensor(positions, dtype=torch.int64)
        owner = self.owner[chosen]
        place = torch.zeros(len(self.owner), dtype=torch.int64)
        place[self.mine] = torch.arange(len(self.mine))
        payload = self.payload.take(place[chosen[owner == self.rank]])
        return Shard(self.index.take(chosen), owner, payload, self.rank)

    def renumbered(self, ranks: Mapping[int, int], rank: int) -> "Shard":
        """Return the table after ranks have new numbers; this one is now `rank`. Raises KeyError if the payload of a
        row was on a rank without one.
        """
        owner = torch.tensor([ranks[each] for each in self.owner.tolist()], dtype=torch.int64)
        return replace(self, owner=owner, rank=rank)

    @staticmethod
    def cat(tables: "Sequence[Shard]") -> "Shard":
        index, payload = Rows.cat([t.index for t in tables]), Rows.cat([t.payload for t in tables])
        return Shard(index, torch.cat([t.owner for t in tables]), payload, tables[0].rank)


class ShardExchange:
    """The collectives of a table. Every rank makes the same calls in the same order, in iteration `iteration`."""

    def __init__(self, world: World, interrupts: Interrupts, trace: TraceWriter | None) -> None:
        self.world, self.interrupts, self.trace = world, interrupts, trace
        # A process alone has no others to wait for.
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
            wanted = owner[source == rank]
            messages: list[bytes | bytearray] = [b""] * self.world.size
            for to in set(wanted.tolist()) - {rank}:
                messages[to] = join(encode(rows.take((wanted == to).nonzero().flatten())))
            received = self.world.exchange(f"rows for {edge} of step {self.iteration}", messages)
            parts = {sender: unpack_rows(message) for sender, message in enumerate(received) if len(message)}
            parts[rank] = rows.take((wanted == rank).nonzero().flatten())
            coming = [((source == sender) & (owner == rank)).nonzero().flatten() for sender in parts]
            moved = Rows.cat(list(parts.values())).take(torch.cat(coming).argsort())
        return replace(table, owner=owner, payload=moved)

    def gather(self, table: Shard, columns: Mapping[str, Column], own: Sums, sums: Sums) -> Shard:
        """All-gather each rank's new columns and metric sums.

        Raises KeyboardInterrupt on every rank if one was asked to stop.
        """
        new = Rows(columns)
        message = own.pairs(), self.interrupts.asked, pack_rows(new.index)
        with traced(self.waits, "ranks", "index columns", self.iteration, state="waiting", version=self.version):
            parts = self.world.gather("index columns", message)
        self.interrupts.agree(any(asked for _, asked, _ in parts))
        sums.merge(*(Sums(counted) for counted, *_ in parts))
        order = torch.cat([(table.owner == rank).nonzero().flatten() for rank in range(self.world.size)]).argsort()
        everywhere = Rows.cat([unpack_rows(index) for *_, index in parts])
        return table.with_columns(everywhere.take(order) if len(everywhere) else Rows({}), new.payload)

    def add_up(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-reduce sums, in the order of ranks; a rank without rows has none."""
        parts = self.world.gather("sums over the batch", {n: t[None] for n, t in own.items()}, dict[str, Tensor])
        found = [totals for totals in parts if totals]
        return {name: torch.stack([totals[name][0] for totals in found]).sum(0) for name in found[0]} if found else {}

    @contextmanager
    def working(self, stage: Stage, rows: Rows) -> Iterator[Span]:
        """Trace the work on rows, and name them if it fails."""
        self.world.rows = named_rows(rows.uids() if "group" in rows else ())
        about = {"rows": len(rows), "tokens": tokens_of(rows), "version": self.version}
        with (
            traced(self.trace, stage.role or "compute", stage.name, self.iteration, **about) as done,
            self.world.supervised("what ranks compute together"),
        ):
            yield done
        self.world.rows = ""


def balanced_owners(costs: Sequence[int], owner: Tensor, ranks: int, groups: Sequence[int] | None = None) -> Tensor:
    """Return each row's rank (B,): `owner` if it is balanced enough, else the result of the partition function.

    Rows of one of `groups` stay together. A new part goes, the fullest first, to the rank that already has most of it.
    """
    parts = balanced_partition(costs, ranks, groups=groups)
    owners = owner.tolist()
    together = groups is None or len(set(groups)) == len(set(zip(groups, owners, strict=True)))
    holding: list[list[int]] = [[] for _ in range(ranks)]
    for row, holder in enumerate(owners):
        holding[holder].append(row)
    if together and imbalance(costs, holding) <= IN_PLACE * imbalance(costs, parts):
        return owner
    chosen: dict[int, list[int]] = {}
    others = []
    for part in parts:
        here: Counter[int] = Counter()
        for row in part:
            here[owners[row]] += costs[row]
        free = [rank for rank in sorted(here) if rank not in chosen]
        if free:
            chosen[max(free, key=lambda rank: here[rank])] = part
        else:
            others.append(part)
    unused = (rank for rank in range(len(parts)) if rank not in chosen)
    target = torch.empty_like(owner)
    for rank, part in {**chosen, **dict(zip(unused, others, strict=True))}.items():
        target[part] = rank
    return target

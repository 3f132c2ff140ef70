"""A table that lies on many ranks: what each of them knows of all rows, and what it has of its own.

            index columns of all rows     owner      payload
rank 0      g0 g0 g1 g1                   0 0 1 1    tokens of rows 0, 1
rank 1      g0 g0 g1 g1                   0 0 1 1    tokens of rows 2, 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from braidrl.data.rows import Column, Rows


@dataclass(frozen=True)
class Shard:
    """One rank's view of a table of B rows.

    `index` holds the index columns of all rows and `owner` (B,) int64 the rank that has each row's payload, the same on every rank;
    `payload` the payload columns of this rank's rows, in the order of the table.
    """

    index: Rows
    owner: Tensor
    payload: Rows
    rank: int

    @property
    def mine(self) -> Tensor:
        """Positions of this rank's rows."""
        return (self.owner == self.rank).nonzero().flatten()

    @property
    def rows(self) -> Rows:
        """This rank's rows with every column."""
        own = self.index.take(self.mine)
        return own.with_columns(dict(self.payload.items())) if len(own) else own

    def take(self, positions: Sequence[int]) -> Shard:
        chosen = torch.tensor(positions, dtype=torch.int64)
        owner = self.owner[chosen]
        place = torch.zeros(len(self.owner), dtype=torch.int64)
        place[self.mine] = torch.arange(len(self.mine))
        payload = self.payload.take(place[chosen[owner == self.rank]])
        return Shard(self.index.take(chosen), owner, payload, self.rank)

    def with_everywhere(self, columns: Mapping[str, Column]) -> Shard:
        """The table with columns that every rank has of all rows; of payload each keeps its own."""
        here = Rows(columns)
        kept = here.payload.take(self.mine) if len(self.mine) else Rows({})
        return replace(self, index=self.index.with_columns(columns_of(here.index)), payload=joined(self.payload, kept))


def columns_of(rows: Rows) -> dict[str, Column]:
    return dict(rows.items())


def joined(payload: Rows, new: Rows) -> Rows:
    """Payload with new columns of the same rows; a rank without rows has no columns."""
    return Rows({**columns_of(payload), **columns_of(new)}) if len(new) or len(payload) else Rows({})


def only_present(rows: Rows, names: Sequence[str]) -> Rows:
    return rows.only([name for name in dict.fromkeys(names) if name in rows])


def named_rows(rows: Rows, most: int = 4) -> str:
    """The first rows' uids, for an error message."""
    if not len(rows) or "group" not in rows:
        return ""
    uids = rows.uids()
    return ", ".join(map(str, uids[:most])) + (f" and {len(uids) - most} more" if len(uids) > most else "")

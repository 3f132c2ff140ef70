"""The table: a row is one trajectory, a column is what one stage added to it.

index column    Tensor (B,)     one fixed-size number per row; copied to the scheduler
payload column  Ragged          a variable number of values per row (tokens, log-probs); moves only where it is needed
                Objects         one JSON value per row (prompt messages, metadata)

`tokens` and `action_mask` have one entry per token of the row, prompt and observations included. Columns about actions
(`rollout_log_probs`, `old_log_probs`, `ref_log_probs`, `values`, `advantages`, `returns`, `token_rewards`) have one
entry per *action token*, in order: tokens that were not sampled have no entry and need no mask.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from braidrl.algorithms.ragged import Ragged
from braidrl.data.identity import IDENTITY, FinishReason, Uid  # noqa: F401  other files import them from here
from braidrl.deferred import Tensor, torch

ROWS_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Objects:
    """One JSON value per row."""

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        return self.values[row]

    def take(self, rows: Tensor) -> "Objects":
        return Objects(tuple(self.values[row] for row in rows.tolist()))


Column = Tensor | Ragged | Objects


class RowTable(Protocol):
    """The operations on rows that a controller needs; on handles and shards they move no rows."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the rows' columns; on a rank without rows there are none."""

    def take(self, positions: Sequence[int]) -> Self:
        """Return the rows at these positions, in this order."""

    @staticmethod
    def cat(tables: Sequence[Any]) -> Any:
        """Concatenate the rows of all tables."""


class Rows:
    """An immutable table. Adding columns or selecting rows gives a new table."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Raise ValueError when columns differ in their number of rows."""
        self._columns = dict(columns)
        # `len` of a tensor is a call of Python code.
        sizes = {
            name: column.shape[0] if isinstance(column, Tensor) else len(column)
            for name, column in self._columns.items()
        }
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns disagree on the number of rows: {sizes}")
        self._size = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            raise KeyError(f"no column {name!r} among {', '.join(self._columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __repr__(self) -> str:
        return f"Rows({len(self)}: {', '.join(self._columns)})"

    def items(self) -> Iterator[tuple[str, Column]]:
        return iter(self._columns.items())

    def get(self, name: str) -> Any:
        return self._columns.get(name)

    def with_columns(self, columns: Mapping[str, Column]) -> "Rows":
        """Return the same rows with these columns added, or replaced by their next version."""
        return Rows({**self._columns, **columns})

    def only(self, names: Sequence[str]) -> "Rows":
        """Return the named columns. Raises KeyError for a missing one."""
        return Rows({name: self[name] for name in names})

    def without(self, names: Collection[str]) -> "Rows":
        return Rows({name: column for name, column in self._columns.items() if name not in names})

    @property
    def index(self) -> "Rows":
        return Rows({name: column for name, column in self._columns.items() if isinstance(column, Tensor)})

    @property
    def payload(self) -> "Rows":
        return Rows({name: column for name, column in self._columns.items() if not isinstance(column, Tensor)})

    def take(self, rows: Tensor | Sequence[int] | Sequence[bool]) -> "Rows":
        """Return rows by position (K,) in this order, or by a boolean mask (B,)."""
        if isinstance(rows, range) and rows == range(self._size):
            return self
        chosen = torch.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else torch.as_tensor(rows)
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        chosen = chosen.to(torch.int64)
        return Rows(
            {
                name: column[chosen] if isinstance(column, Tensor) else column.take(chosen)
                for name, column in self._columns.items()
            }
        )

    def part(self, start: int, end: int) -> "Rows":
        """Return the rows from one position to another as views on the columns, all of which are index columns."""
        return Rows({name: self[name][start:end] for name in self})

    def uids(self) -> list[tuple[int, int, int]]:
        """Return (source, group, sample) of each row: its identity through the whole run."""
        return list(zip(*(self[name].tolist() for name in IDENTITY), strict=True))

    def positions_of(self, rows: "Rows") -> Tensor:
        """Return the positions (K,) of K rows of this table, found by group and sample."""
        samples = int(torch.maximum(self["sample"].max(), rows["sample"].max())) + 1
        names, wanted = (table["group"].long() * samples + table["sample"].long() for table in (self, rows))
        order = names.argsort()
        return order[torch.searchsorted(names[order], wanted)]

    def ordered(self) -> "Rows":
        """Return the rows sorted by (group, sample), the order of training; it is independent of completion order."""
        by_sample = self["sample"].argsort(stable=True)
        return self.take(by_sample[self["group"][by_sample].argsort(stable=True)])

    @staticmethod
    def cat(parts: "Sequence[Rows]") -> "Rows":
        """Concatenate rows. Raises ValueError when a part lacks a column that another has."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        if not parts:
            return Rows({})
        for part in parts:
            if set(part) != set(parts[0]):
                raise ValueError(f"parts differ in columns: {sorted(set(part) ^ set(parts[0]))}")
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Column] = {}
        for name, first in parts[0].items():
            columns = [part[name] for part in parts]
            if isinstance(first, Ragged):
                joined[name] = Ragged.cat(columns)
            elif isinstance(first, Objects):
                joined[name] = Objects(tuple(value for column in columns for value in column.values))
            else:
                joined[name] = torch.cat(columns)
        return Rows(joined)


def merged_rows(size: int, segments: Sequence[tuple[Tensor, Rows]]) -> Rows:
    """Merge segments (positions, rows) into one table of `size` rows; later segments take precedence.

    Columns that some row lacks are omitted.
    """
    by_name: dict[str, list[tuple[Tensor, Column]]] = {}
    for positions, rows in segments:
        for name, column in rows.items():
            by_name.setdefault(name, []).append((positions, column))
    merged: dict[str, Column] = {}
    for name, columns in by_name.items():
        if len(columns) == 1 and torch.equal(columns[0][0], torch.arange(size)):
            # One segment with all rows in order, the usual case, needs no copy.
            merged[name] = columns[0][1]
            continue
        positions_in_parts, start = torch.full((size,), -1), 0
        for positions, column in columns:
            positions_in_parts[positions] = torch.arange(start, start + len(column))
            start += len(column)
        if not bool((positions_in_parts < 0).any()):
            merged[name] = Rows.cat([Rows({name: column}) for _, column in columns]).take(positions_in_parts)[name]
    return Rows(merged)


def named_rows(uids: Sequence[tuple[int, int, int]], count: int | None = None) -> str:
    """Return ` on 12 rows (source, group, sample): (0, 3, 0) (0, 3, 1) ...` for a message; empty without rows.

    `count` is the total number of rows, of which the first ones suffice.
    """
    if not uids:
        return ""
    count = len(uids) if count is None else count
    shown = " ".join(str(tuple(uid)) for uid in uids[:ROWS_SHOWN])
    more = " ..." if count > ROWS_SHOWN else ""
    return f" on {count} rows (source, group, sample): {shown}{more}"


def tokens_of(rows: Rows) -> int:
    """Count the tokens of all rows; 0 before generation."""
    return int(rows["length"].sum()) if "length" in rows else 0

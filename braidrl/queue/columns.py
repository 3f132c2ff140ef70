"""Conversion of columns: numpy arrays, torch tensors, lists and TensorDicts to the queue's form, and back.

Tensor (B, ...), array                          ──▶ Tensor       one value, or one shape, per row
jagged nested tensor, list of 1-d tensors       ──▶ Ragged       a different number of values per row
list of JSON values                             ──▶ Objects
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Column, Objects, Rows


def as_rows(columns: Any) -> Rows:
    """Convert columns by name, a mapping or a TensorDict, to rows. Raises ValueError if their numbers of rows differ."""
    return Rows({str(name): as_column(value) for name, value in columns.items()})


def as_column(value: Any) -> Column:
    """Convert one column of any supported type."""
    if isinstance(value, Ragged | Objects):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        return ragged([row.detach().cpu() for row in value.unbind()]) if value.is_nested else value.detach().cpu()
    rows = list(value)
    if rows and all(isinstance(row, Tensor | np.ndarray) and row.ndim == 1 for row in rows):
        return ragged([torch.as_tensor(row).cpu() for row in rows])
    if rows and all(isinstance(row, bool | int | float) for row in rows):
        return torch.tensor(rows)
    return Objects(tuple(rows))


def ragged(rows: Sequence[Tensor]) -> Ragged:
    """Convert rows of different lengths to one column."""
    return Ragged.from_lengths(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))


class Batch(Mapping[str, Any]):
    """Rows given to a task: their names, and columns as tensors, ragged columns or lists."""

    def __init__(self, rows: Sequence[Any], columns: Rows, task: str, leases: Sequence[int]) -> None:
        """Store `columns` of the rows with these names; `leases` hold them for the task."""
        self.rows, self.columns, self.task, self.leases = list(rows), columns, task, list(leases)

    def __getitem__(self, name: str) -> Any:
        column = self.columns[name]
        return list(column.values) if isinstance(column, Objects) else column

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(list(self.columns))

    def torch(self) -> dict[str, Any]:
        """Return tensors, and lists of tensors for ragged columns. They may be in shared memory: do not write to them."""
        found = ((name, self[name]) for name in self)
        return {n: [c[row] for row in range(len(c))] if isinstance(c, Ragged) else c for n, c in found}

    def numpy(self) -> dict[str, Any]:
        """Return arrays on the same memory."""
        found = self.torch()
        return {
            name: [plain(row) for row in column] if isinstance(column, list) else plain(column)
            for name, column in found.items()
        }

    def tensordict(self) -> Any:
        """Return a TensorDict, with jagged nested tensors for ragged columns. Needs the package tensordict."""
        from tensordict import NonTensorStack, TensorDict

        columns = {}
        for name in self:
            column = self[name]
            if isinstance(column, Ragged):
                column = torch.nested.nested_tensor_from_jagged(column.values.clone(), column.offsets.clone())
            columns[name] = NonTensorStack(*column) if isinstance(column, list) else column
        return TensorDict(columns, batch_size=[len(self.rows)])


def plain(value: Any) -> Any:
    """Convert a tensor to an array; bfloat16, which numpy lacks, becomes float32."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

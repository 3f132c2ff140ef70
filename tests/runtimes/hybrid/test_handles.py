"""A column in several pieces is joined into one."""

from __future__ import annotations

import torch
from torch import Tensor

from braidrl.data.rows import merged_column


def test_rows_are_reordered_only_if_workers_differ() -> None:
    column, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.0, 9.0])
    assert merged_column(3, [(torch.arange(3), column)]) is column, "the column was copied"
    assert listed(merged_column(3, [(torch.tensor([2, 0, 1]), column)])) == [2, 3, 1]
    assert listed(merged_column(3, [(torch.arange(3), column), (torch.tensor([2, 0]), other)])) == [9, 2, 7]


def test_a_column_missing_in_a_row_is_none() -> None:
    column = torch.tensor([1.0, 2.0])
    assert merged_column(3, [(torch.arange(2), column)]) is None
    assert merged_column(3, [(torch.tensor([0, 2]), column)]) is None


def listed(column: object) -> list[float]:
    assert isinstance(column, Tensor)
    found: list[float] = column.tolist()
    return found

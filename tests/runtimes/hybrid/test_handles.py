"""A column in several pieces is joined into one."""

from __future__ import annotations

import torch
from torch import Tensor

from braidrl.data.rows import Rows, merged_rows

COLUMN, OTHER = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.0, 9.0])


def merged(*segments: tuple[Tensor, Tensor]) -> Rows:
    return merged_rows(3, [(positions, Rows({"score": column})) for positions, column in segments])


def test_rows_are_reordered_only_if_workers_differ() -> None:
    assert merged((torch.arange(3), COLUMN))["score"] is COLUMN, "the column was copied"
    assert merged((torch.tensor([2, 0, 1]), COLUMN))["score"].tolist() == [2, 3, 1]
    assert merged((torch.arange(3), COLUMN), (torch.tensor([2, 0]), OTHER))["score"].tolist() == [9, 2, 7]


def test_a_column_missing_in_a_row_is_omitted() -> None:
    assert "score" not in merged((torch.arange(2), COLUMN[:2]))
    assert "score" not in merged((torch.tensor([0, 2]), COLUMN[:2]))

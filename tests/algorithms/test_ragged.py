"""Ragged rows and groups match plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.advantages import Groups
from braidrl.algorithms.ragged import Ragged
from tests.algorithms.batches import floats, grouped, ragged, ragged_rows


@given(ragged_rows())
def test_row_sums_means_and_spread_match_lists(rows: list[list[float]]) -> None:
    values = ragged(rows)
    assert values.tolist() == rows
    assert values.row_sums().tolist() == pytest.approx([sum(row) for row in rows])
    assert values.row_means().tolist() == pytest.approx([sum(row) / max(len(row), 1) for row in rows])
    numbers = torch.arange(len(rows))
    assert values.spread(numbers).tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert values.row_ids().tolist() == values.spread(numbers).tolist()


@given(ragged_rows(), st.data())
def test_take_and_cat_return_the_expected_rows(rows: list[list[float]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    taken = ragged(rows).take(torch.tensor(chosen, dtype=torch.int64))
    assert taken.tolist() == [rows[i] for i in chosen]
    assert Ragged.cat([taken, ragged(rows)]).tolist() == [rows[i] for i in chosen] + rows


def test_offsets_that_do_not_end_at_the_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"offsets .* 3 .* 2 values"):
        Ragged(torch.zeros(2), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="int64"):
        Ragged(torch.zeros(2), torch.tensor([0.0, 2.0]))


@given(grouped(), st.data())
def test_groups_are_found_for_arbitrary_group_numbers(batch: tuple[list[float], list[int]], data) -> None:
    values, numbers = batch
    weights = data.draw(st.lists(st.integers(0, 3).map(float), min_size=len(values), max_size=len(values)))
    groups = Groups(torch.tensor(numbers))
    own = [[i for i, n in enumerate(numbers) if n == number] for number in sorted(set(numbers))]
    assert groups.numbers.tolist() == sorted(set(numbers))
    assert groups.sizes.tolist() == [len(rows) for rows in own]
    assert groups.sums(floats(values)).tolist() == pytest.approx([sum(values[i] for i in rows) for rows in own])
    means = [sum(weights[i] * values[i] for i in rows) / (sum(weights[i] for i in rows) or 1) for rows in own]
    assert groups.means(floats(values), floats(weights)).tolist() == pytest.approx(means)
    varied = [len({values[i] for i in rows if weights[i] > 0}) > 1 for rows in own]
    assert Groups(torch.tensor(numbers), floats(weights)).varies(floats(values)).tolist() == varied

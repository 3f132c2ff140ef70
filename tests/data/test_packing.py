"""Micro-batches hold whole rows within the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.packing import plan_micro_batches
from braidrl.errors import UserError


@given(st.lists(st.integers(1, 100), max_size=60), st.sampled_from([100, 150, 1000]))
def test_every_row_is_packed_once_within_the_limit_heaviest_first(lengths: list[int], max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) and rows for rows in plan)
    totals = [sum(lengths[row] for row in rows) for rows in plan]
    assert totals == sorted(totals, reverse=True) and max(totals, default=0) <= max_tokens


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_the_number_of_micro_batches_is_near_the_least_that_could_hold_the_tokens(lengths: list[int]) -> None:
    # Parts differ by at most 100 tokens: with a mean of 100 none is above 200.
    assert -(-sum(lengths) // 200) <= len(plan_micro_batches(lengths, 200)) <= -(-sum(lengths) // 100)


def test_a_row_over_the_limit_is_refused_by_name() -> None:
    uids = [(0, 3, 0), (0, 3, 1)]
    with pytest.raises(UserError, match=r"row \(0, 3, 1\).* 130 .*max_tokens_per_device=100.*=130"):
        plan_micro_batches([40, 130], 100, uids)

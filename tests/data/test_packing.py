"""Micro-batches hold whole rows within the limit, and every rank has the same number of micro-batches."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.packing import imbalance, plan_micro_batches
from braidrl.errors import UserError


@given(st.lists(st.integers(1, 150), max_size=60), st.integers(1, 9), st.sampled_from([100, 150, 1000]))
def test_every_row_is_packed_once_within_the_limit_and_ranks_run_equally_many(
    lengths: list[int], dp_size: int, max_tokens: int
) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens, oversized="alone")
    assert len(plan) == dp_size and len({len(rank) for rank in plan}) == 1
    packed = [row for rank in plan for rows in rank for row in rows]
    assert sorted(packed) == list(range(len(lengths)))
    for rows in (rows for rank in plan for rows in rank):
        assert rows == sorted(rows)
        assert sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9))
def test_the_number_of_micro_batches_is_near_the_least_that_could_hold_the_tokens(
    lengths: list[int], dp_size: int
) -> None:
    count = len(plan_micro_batches(lengths, dp_size, 200)[0])
    least = -(-sum(lengths) // (200 * dp_size))
    # Parts differ by at most 100 tokens: with a mean of 100 none is above 200.
    assert least <= count <= -(-sum(lengths) // (100 * dp_size))


def test_fewer_rows_than_ranks_leave_empty_micro_batches() -> None:
    assert plan_micro_batches([7, 9], 4, 100) == [[[1]], [[0]], [[]], [[]]]
    assert plan_micro_batches([], 2, 100) == [[], []]


def test_a_row_over_the_limit_is_refused_by_name_or_trained_alone() -> None:
    uids = [(0, 3, 0), (0, 3, 1)]
    with pytest.raises(UserError, match=r"row \(0, 3, 1\) has 130 tokens .*max_tokens_per_device=100 .*write .*=130"):
        plan_micro_batches([40, 130], 1, 100, uids=uids)
    assert plan_micro_batches([40, 130, 30], 1, 100, oversized="alone") == [[[1], [0, 2]]]
    assert plan_micro_batches([130], 2, 100, oversized="alone") == [[[0]], [[]]]


def test_costs_balance_the_ranks_where_lengths_would_not() -> None:
    lengths = [1000] * 4 + [100] * 40
    costs = [3 * (2 * 1000 * length + 2 * 4 * 256 * length**2) for length in lengths]
    plan = plan_micro_batches(lengths, 2, 1000, costs=costs)
    ranks = [[row for rows in rank for row in rows] for rank in plan]
    assert imbalance(costs, ranks) < 1.01


def test_ranks_begin_with_their_heaviest_micro_batch() -> None:
    lengths = [30, 120, 90, 60, 80, 20, 70, 130, 10, 40]
    for rank in plan_micro_batches(lengths, 2, 110, oversized="alone"):
        totals = [sum(lengths[row] for row in rows) for rows in rank]
        assert totals == sorted(totals, reverse=True)


def test_8192_long_tailed_rows_on_256_ranks_are_even_and_quick() -> None:
    draw = random.Random(0)
    lengths = [min(32_768, int(draw.lognormvariate(7, 1.2))) + 1 for _ in range(8192)]
    began = time.thread_time()
    plan = plan_micro_batches(lengths, 256, 32_769)
    assert time.thread_time() - began < 2
    assert imbalance(lengths, [[row for rows in rank for row in rows] for rank in plan]) < 1.01

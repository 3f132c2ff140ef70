"""Rows arrive complete at the ranks that need them, and no other rows travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import bytes_of
from braidrl.data.packing import balanced_partition, imbalance
from braidrl.runtimes.spmd.shard import IN_PLACE, Form, balanced_owners
from tests.runtimes.spmd.moving import RANKS

Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the results of three ranks, all started once."""
    result: Answers = run_ranks("tests.runtimes.spmd.moving:answers", {}, RANKS, 200.0)
    return result


def test_all_column_kinds_arrive_whole_even_with_empty_ranks(
    answers: Answers,
) -> None:
    for rank, result in enumerate(answers["columns_of_every_kind"]):
        assert len(result) == 16
        assert all(result.values()), f"rank {rank}: {[edge for edge, same in result.items() if not same]}"


def test_a_rank_receives_its_own_rows_and_nothing_more(answers: Answers) -> None:
    result = answers["bytes_of_an_exchange"]
    for about in result:
        # Two messages have two headers, of a few hundred bytes each.
        assert about["received"] <= about["needed"] + 4096
    assert result[2]["needed"] > 20_000, "otherwise the test proves nothing"


def test_rows_that_stay_where_they_are_are_not_touched(answers: Answers) -> None:
    assert answers["nothing_moves"] == [{"same object": True, "received": 0}] * RANKS


owned = st.integers(1, 5).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.lists(st.tuples(st.integers(0, 100), st.integers(0, ranks - 1)), min_size=1, max_size=20),
    )
)


@given(owned)
def test_rows_move_only_to_reach_best_balance(
    case: tuple[int, list[tuple[int, int]]],
) -> None:
    ranks, rows = case
    costs, owner = [cost for cost, _ in rows], torch.tensor([rank for _, rank in rows])
    target = balanced_owners(torch.tensor(costs), owner, ranks)
    parts = [(target == rank).nonzero().flatten().tolist() for rank in range(ranks)]
    best = imbalance(costs, balanced_partition(costs, ranks))
    if torch.equal(target, owner):
        assert imbalance(costs, parts) <= IN_PLACE * best
    else:
        assert imbalance(costs, parts) == pytest.approx(best)


def test_new_partition_keeps_rows_with_their_main_rank() -> None:
    target = balanced_owners(torch.tensor([10, 7, 5, 1]), torch.tensor([2, 2, 0, 0]), 4)
    assert target.tolist()[0] == 2 and target.tolist()[2] == 0 and sorted(target.tolist()) == [0, 1, 2, 3]


def sent(parts: list[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Return the bytes for each row that ranks send for a column, and the column of all of them."""
    form = Form.of(parts[0])
    for part in parts[1:]:
        form = form.of_both(Form.of(part))
    narrow = torch.empty(0) if form.is_constant else torch.cat([form.narrowed(part) for part in parts])
    rows = sum(map(len, parts))
    return (0 if form.is_constant else narrow.element_size()), form.widened(None if form.is_constant else narrow, rows)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([torch.tensor([7, 7], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)], 0),
        ([torch.tensor([True, True]), torch.tensor([], dtype=torch.bool)], 0),
        ([torch.tensor([True, False]), torch.tensor([True])], 1),
        ([torch.tensor([10**12, 10**12 + 3]), torch.tensor([10**12 - 200])], 1),
        ([torch.tensor([-300, 4]), torch.tensor([65_000])], 2),
        ([torch.tensor([0, 2**31 - 1], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)], 4),
        ([torch.tensor([-(2**62), 2**62])], 8),
        ([torch.tensor([0.5, 0.5]), torch.tensor([0.5])], 4),
        ([torch.tensor([1.0, 1.0]), torch.tensor([1.0])], 0),
        ([torch.tensor([0.0, 1.0]), torch.tensor([-3.0])], 1),
        ([torch.tensor([0.0, 1.0], dtype=torch.bfloat16), torch.tensor([], dtype=torch.bfloat16)], 1),
        ([torch.tensor([0.0, 1.0]), torch.tensor([0.5])], 4),
        ([torch.tensor([0.0, float("inf")]), torch.tensor([1.0])], 4),
        ([torch.tensor([0.0, -0.0]), torch.tensor([0.0])], 4),
        ([torch.tensor([2.0**40, 0.0], dtype=torch.float64)], 8),
        ([torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)], 8),
    ],
)
def test_index_columns_are_sent_in_as_few_bytes_as_their_range_takes(parts: list[torch.Tensor], size: int) -> None:
    bytes_of_row, column = sent(parts)
    assert bytes_of_row == size
    assert torch.equal(bytes_of(column), bytes_of(torch.cat(parts))) and column.dtype == parts[0].dtype

"""Optimizer steps contain all of their rows and no others, for any order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.flow.batches import check_update_size, update_plan


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    size = draw(st.integers(1, 4))
    groups = draw(st.lists(st.integers(0, 1000), unique=True, min_size=1, max_size=12))
    rows = [(group, sample) for group in groups for sample in range(size)]
    divisors = [n for n in range(1, len(rows) + 1) if len(rows) % n == 0]
    return draw(st.permutations(rows)), draw(st.sampled_from(divisors))


def plan(rows: list[tuple[int, int]], per_update: int, epochs: int, seed: int, iteration: int) -> list[list[int]]:
    groups, samples = zip(*rows, strict=True)
    return update_plan(groups, samples, rows_per_update=per_update, epochs=epochs, seed=seed, iteration=iteration)


@given(batches(), st.integers(1, 3), st.integers(0, 99), st.integers(0, 99))
def test_each_epoch_trains_each_row_once_in_updates_of_the_asked_size(
    batch: tuple[list[tuple[int, int]], int], epochs: int, seed: int, iteration: int
) -> None:
    rows, per_update = batch
    updates = plan(rows, per_update, epochs, seed, iteration)
    assert all(len(update) == per_update for update in updates)
    per_epoch = len(rows) // per_update
    for epoch in range(epochs):
        trained = [row for update in updates[epoch * per_epoch : (epoch + 1) * per_epoch] for row in update]
        assert sorted(trained) == list(range(len(rows)))


@given(batches(), st.data())
def test_the_order_of_arrival_changes_nothing(batch: tuple[list[tuple[int, int]], int], data: st.DataObject) -> None:
    rows, per_update = batch
    arrived = data.draw(st.permutations(rows))
    members = [[rows[i] for i in update] for update in plan(rows, per_update, 2, 3, 4)]
    assert members == [[arrived[i] for i in update] for update in plan(arrived, per_update, 2, 3, 4)]
    assert all(update == sorted(update) for update in members)


def test_a_group_stays_together_where_updates_hold_whole_groups() -> None:
    rows = [(group, sample) for group in range(16) for sample in range(4)]
    for update in plan(rows, 8, 3, 0, 0):
        assert len({rows[i][0] for i in update}) == 2


def test_every_epoch_and_iteration_has_its_own_shuffle() -> None:
    rows = [(group, 0) for group in range(32)]
    first, second = plan(rows, 32, 2, 0, 0), plan(rows, 8, 2, 0, 0)
    assert first[0] == first[1] == list(range(32))
    assert second[:4] != second[4:] and second != plan(rows, 8, 2, 0, 1) and second != plan(rows, 8, 2, 1, 0)


@given(st.integers(1, 12), st.data())
def test_older_groups_are_spread_evenly_over_updates(groups: int, data: st.DataObject) -> None:
    older = data.draw(st.integers(0, groups))
    per_update = data.draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0]))
    numbers = range(groups)
    updates = update_plan(numbers, [0] * groups, rows_per_update=per_update, epochs=2, seed=1, iteration=3, older=older)
    for update in updates:
        assert abs(sum(row < older for row in update) - per_update * older / groups) <= 1
    assert sorted(row for update in updates for row in update) == sorted([*numbers, *numbers])


def test_rows_must_make_a_whole_number_of_updates() -> None:
    with pytest.raises(ValueError, match=r"3 rows .*multiple.*2 rows"):
        plan([(0, 0), (0, 1), (1, 0)], 2, 1, 0, 0)
    with pytest.raises(ValueError, match="same group and sample"):
        plan([(0, 0), (0, 0)], 2, 1, 0, 0)


def test_an_indivisible_update_size_is_refused_with_a_remedy() -> None:
    assert check_update_size(32, 8, None) == 256
    assert check_update_size(32, 8, 64) == 64
    with pytest.raises(UserError, match=r"rows_per_update=100.* 256 rows.*write 64 or 128"):
        check_update_size(32, 8, 100)
    with pytest.raises(UserError, match=r"write 256$"):
        check_update_size(32, 8, 512)

"""Dynamic sampling drops the right groups for the right reasons."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.advantages import informative_groups, informative_rewards
from tests.algorithms.batches import floats, grouped


@given(grouped(st.sampled_from([0.0, 1.0])))
def test_groups_are_kept_when_some_but_not_all_samples_are_right(batch: tuple[list[float], list[int]]) -> None:
    correct, groups = batch
    dropped = informative_groups(floats(correct), torch.tensor(groups))
    for number in set(groups):
        own = [c for c, g in zip(correct, groups, strict=True) if g == number]
        expected = {0: "all wrong", len(own): "all correct"}.get(int(sum(own)))
        assert dropped.get(number) == expected


@given(grouped())
def test_informative_rewards_drops_groups_with_equal_rewards(batch) -> None:
    reward, groups = batch
    dropped = informative_rewards(floats(reward), torch.tensor(groups))
    equal = {n for n in set(groups) if len({r for r, g in zip(reward, groups, strict=True) if g == n}) == 1}
    assert dropped == dict.fromkeys(equal, "all rewards equal")


@given(grouped(st.sampled_from([0.0, 1.0])), st.randoms(use_true_random=False))
def test_dynamic_sampling_does_not_depend_on_row_order(batch, order) -> None:
    pairs = list(zip(*batch, strict=True))
    straight = informative_groups(floats([c for c, _ in pairs]), torch.tensor([g for _, g in pairs]))
    order.shuffle(pairs)
    assert informative_groups(floats([c for c, _ in pairs]), torch.tensor([g for _, g in pairs])) == straight


def test_a_score_of_minus_1_does_not_count_as_a_success() -> None:
    assert informative_groups(floats([-1.0, -1.0]), torch.tensor([4, 4])) == {4: "all wrong"}


def test_rows_that_do_not_count_in_statistics_make_no_group_informative() -> None:
    group, counted = torch.tensor([0, 0, 1, 1, 2, 2]), floats([1, 1, 1, 0, 0, 0])
    correct = floats([1, 0, 1, 0, 1, 0])
    assert informative_groups(correct, group, counted) == {1: "all correct", 2: "all wrong"}
    assert informative_rewards(correct, group, counted) == dict.fromkeys((1, 2), "all rewards equal")

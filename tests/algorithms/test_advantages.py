"""Group advantages match plain loops, and keep their common properties."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms import advantages as adv
from braidrl.algorithms.registry import advantages
from tests.algorithms.batches import floats, grouped

GROUP = ["group_normalized", "group_centered", "leave_one_out", "optimal_baseline", "maxrl", "pass_at_k"]
successes = st.sampled_from([0.0, 1.0])


def members(groups: list[int], row: int) -> list[int]:
    return [other for other, g in enumerate(groups) if g == groups[row]]


def call(name: str, values: list[float], groups: list[int], lengths: list[int]) -> torch.Tensor:
    """Call any group advantage by name, with the columns that it names."""
    entry = advantages[name]
    columns = {
        "reward": floats(values),
        "correct": floats(values),
        "group": torch.tensor(groups),
        "action_tokens": torch.tensor(lengths),
    }
    settings = {"k": 1} if name == "pass_at_k" else {}
    return entry.function(*(columns[column] for column in entry.reads), **settings)


@given(grouped())
def test_group_normalized_matches_a_loop_over_each_group(batch: tuple[list[float], list[int]]) -> None:
    values, groups = batch
    result = adv.group_normalized(floats(values), torch.tensor(groups))
    for row, value in enumerate(values):
        own = [values[m] for m in members(groups, row)]
        deviation = statistics.stdev(own) if len(own) > 1 else 0.0
        expected = (value - statistics.fmean(own)) / (deviation + 1e-6) if len(set(own)) > 1 else 0.0
        assert result[row].item() == pytest.approx(expected, abs=1e-9)


@given(grouped())
def test_group_centered_and_leave_one_out_match_loops(batch: tuple[list[float], list[int]]) -> None:
    values, groups = batch
    group = torch.tensor(groups)
    centered, left_out = adv.group_centered(floats(values), group), adv.leave_one_out(floats(values), group)
    for row, value in enumerate(values):
        own = members(groups, row)
        others = [values[m] for m in own if m != row]
        assert centered[row].item() == pytest.approx(value - statistics.fmean(values[m] for m in own), abs=1e-12)
        expected = value - statistics.fmean(others) if others else 0.0
        assert left_out[row].item() == pytest.approx(expected, abs=1e-12)


@given(grouped(), st.data())
def test_optimal_baseline_weighs_scores_by_length(batch: tuple[list[float], list[int]], data: st.DataObject) -> None:
    values, groups = batch
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=len(values), max_size=len(values)))
    result = adv.optimal_baseline(floats(values), torch.tensor(lengths), torch.tensor(groups))
    for row, value in enumerate(values):
        own = members(groups, row)
        baseline = sum(lengths[m] * values[m] for m in own) / sum(lengths[m] for m in own)
        assert result[row].item() == pytest.approx(value - baseline, abs=1e-12)


@given(grouped(successes))
def test_maxrl_divides_by_the_success_rate(batch: tuple[list[float], list[int]]) -> None:
    values, groups = batch
    result = adv.maxrl(floats(values), torch.tensor(groups))
    for row, value in enumerate(values):
        rate = statistics.fmean(values[m] for m in members(groups, row))
        assert result[row].item() == pytest.approx((value - rate) / rate if rate else 0.0, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("correct", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]])
def test_pass_at_k_is_the_mean_advantage_over_subsets_of_a_sample(correct: list[int], k: int) -> None:
    result = adv.pass_at_k(floats([float(c) for c in correct]), torch.zeros(len(correct), dtype=torch.int64), k=k)
    subsets = list(itertools.combinations(range(len(correct)), k))
    best = {subset: float(max(correct[i] for i in subset)) for subset in subsets}
    mean, deviation = statistics.fmean(best.values()), statistics.pstdev(best.values())
    for row in range(len(correct)):
        own = [(best[s] - mean) / deviation for s in subsets if row in s] if deviation else [0.0]
        assert result[row].item() == pytest.approx(statistics.fmean(own), abs=1e-12)


def test_pass_at_k_refuses_groups_smaller_than_k() -> None:
    with pytest.raises(ValueError, match=r"k=4 .* 4 samples .* 3"):
        adv.pass_at_k(torch.ones(3), torch.zeros(3, dtype=torch.int64), k=4)


def test_pass_at_k_gives_0_where_fewer_than_k_samples_count() -> None:
    # As where `overlong_exclude` leaves one of three samples.
    group, counted = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    result = adv.pass_at_k(floats([1, 0, 0, 1, 0, 0]), group, counted, k=2)
    assert result[:3].tolist() == [0, 0, 0]
    assert result[3:].tolist() == adv.pass_at_k(floats([1, 0, 0]), group[:3], k=2).tolist() != [0, 0, 0]


def test_remax_subtracts_the_greedy_reward_of_the_greedy_namespace() -> None:
    assert adv.remax(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 1.0])).tolist() == [0.5, -1.0]
    entry = advantages["remax"]
    assert [entry.column(c) for c in entry.reads] == ["reward", "greedy.reward"]


@pytest.mark.parametrize("name", GROUP)
@given(batch=grouped(successes), order=st.randoms(use_true_random=False))
def test_group_advantages_accept_any_row_order_and_incomplete_groups(name: str, batch, order) -> None:
    values, groups = batch
    lengths = [3 + (5 * i) % 7 for i in range(len(values))]
    shuffled = list(range(len(values)))
    order.shuffle(shuffled)
    straight = call(name, values, groups, lengths)
    mixed = call(name, *([column[i] for i in shuffled] for column in (values, groups, lengths)))
    torch.testing.assert_close(mixed, straight[shuffled], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GROUP)
@given(batch=grouped(successes))
def test_group_advantages_are_independent_of_other_groups(name: str, batch) -> None:
    values, groups = batch
    lengths = [3 + (5 * i) % 7 for i in range(len(values))]
    together = call(name, values, groups, lengths)
    for number in set(groups):
        own = [i for i, g in enumerate(groups) if g == number]
        alone = call(name, *([column[i] for i in own] for column in (values, groups, lengths)))
        torch.testing.assert_close(together[own], alone, rtol=0, atol=1e-12)


@given(grouped(), st.floats(-5, 5), st.floats(0.5, 4))
def test_advantages_ignore_reward_shift_and_normalised_ones_ignore_scale(batch, shift, scale) -> None:
    values, groups = batch
    reward, group = floats(values), torch.tensor(groups)
    lengths = torch.arange(1, len(values) + 1)
    for function in (adv.group_centered, adv.leave_one_out):
        torch.testing.assert_close(function(reward * scale + shift, group), function(reward, group) * scale)
    torch.testing.assert_close(
        adv.optimal_baseline(reward * scale + shift, lengths, group),
        adv.optimal_baseline(reward, lengths, group) * scale,
    )
    torch.testing.assert_close(
        adv.group_normalized(reward * scale + shift, group, epsilon=0.0 + 1e-12),
        adv.group_normalized(reward, group, epsilon=0.0 + 1e-12),
        atol=1e-7,
        rtol=1e-7,
    )


@given(grouped())
def test_centred_advantages_sum_to_zero_in_each_group(batch) -> None:
    values, groups = batch
    for function in (adv.group_normalized, adv.group_centered, adv.leave_one_out):
        result = function(floats(values), torch.tensor(groups))
        for number in set(groups):
            assert result[torch.tensor(groups) == number].sum().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.1, 0.3, 1 / 3, 1e6 + 0.1])
def test_equal_scores_give_exactly_zero_despite_rounding_of_the_mean(score: float, dtype: torch.dtype) -> None:
    reward, group = torch.full((7,), score, dtype=dtype), torch.zeros(7, dtype=torch.int64)
    for function in (adv.group_normalized, adv.group_centered, adv.leave_one_out):
        result = function(reward, group)
        assert result.dtype == dtype and result.tolist() == [0.0] * 7


def test_masked_rows_get_zero_advantage_and_do_not_affect_others() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.5, 9.0]), torch.zeros(4, dtype=torch.int64)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    for function in (adv.group_normalized, adv.group_centered, adv.leave_one_out):
        kept = function(reward[:3], group[:3])
        torch.testing.assert_close(function(reward, group, mask), torch.cat([kept, torch.zeros(1)]))
    every = torch.zeros(4)
    assert adv.group_normalized(reward, group, every).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", GROUP)
def test_zero_rows_give_zero_advantages(name: str) -> None:
    assert call(name, [], [], []).shape == (0,)

"""Advantages per token and whitening match plain loops, for any distribution of rows over ranks."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms import token_advantages as adv
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Entry, advantages, shapes
from tests.algorithms.batches import floats, ragged, ragged_rows

unit = st.floats(0, 1)


def in_two_parts(entry: Entry, pieces: Sequence[tuple[Any, ...]], **settings: Any) -> list[Any]:
    """Call a function of scope `batch` as a runtime does: sum over each piece, add the sums, then apply to each
    piece.
    """
    assert entry.sums is not None
    named = {name: value for name, value in settings.items() if name in inspect.signature(entry.sums).parameters}
    sums = [entry.sums(*piece, **named) for piece in pieces]
    totals = {name: torch.stack([part[name] for part in sums]).sum(0) for name in sums[0]}
    return [entry.function(*piece, totals=totals, **settings) for piece in pieces]


def whitened_loop(rows: list[list[float]], epsilon: float = 1e-8) -> list[float]:
    flat = [x for row in rows for x in row]
    variance = statistics.variance(flat) if len(flat) > 1 else 0.0
    return [(x - statistics.fmean(flat)) / (variance + epsilon) ** 0.5 for x in flat]


@given(ragged_rows(st.integers(-8, 8).map(float)).filter(any))
def test_whitening_gives_mean_0_and_deviation_1_over_action_tokens(rows: list[list[float]]) -> None:
    (result,) = in_two_parts(advantages["whiten"], [(ragged(rows),)])
    assert result.values.tolist() == pytest.approx(whitened_loop(rows), abs=1e-6)
    if len(set(result.values.tolist())) > 1:
        assert result.values.std().item() == pytest.approx(1, abs=1e-6)


@given(ragged_rows(), st.integers(0, 5))
def test_whitening_does_not_depend_on_the_distribution_of_rows(rows: list[list[float]], cut: int) -> None:
    whole = in_two_parts(advantages["whiten"], [(ragged(rows),)])[0]
    pieces = [(ragged(part),) for part in (rows[cut:], rows[:cut])]
    last, first = in_two_parts(advantages["whiten"], pieces)
    torch.testing.assert_close(torch.cat([first.values, last.values]), whole.values)


@given(ragged_rows(st.integers(-8, 8).map(float)), st.floats(-5, 5), st.floats(0.5, 4))
def test_whitening_is_invariant_to_shift_and_scale(rows: list[list[float]], shift: float, scale: float) -> None:
    values = ragged(rows)
    moved = values.with_values(values.values * scale + shift)
    one, other = (in_two_parts(advantages["whiten"], [(v,)])[0] for v in (values, moved))
    torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4)


def test_masked_rows_do_not_affect_whitening_statistics() -> None:
    rows = [[1.0, 2.0], [4.0], [1000.0]]
    (result,) = in_two_parts(advantages["whiten"], [(ragged(rows), floats([1.0, 1.0, 0.0]))])
    assert result.values[:3].tolist() == pytest.approx(whitened_loop(rows[:2]))


@given(ragged_rows(min_len=1), unit, st.data())
def test_reinforce_plus_plus_is_whitened_returns_to_go(rows: list[list[float]], gamma: float, data: Any) -> None:
    lengths = torch.tensor([len(row) for row in rows])
    reward = data.draw(st.lists(st.integers(-2, 2).map(float), min_size=len(rows), max_size=len(rows)))
    ends = [[0.0] * (len(row) - 1) + [r] for row, r in zip(rows, reward, strict=True)]
    for token_rewards, per_token in ((None, ends), (ragged(rows), rows)):
        to_go = [[sum(gamma**i * x for i, x in enumerate(row[t:])) for t in range(len(row))] for row in per_token]
        (result,) = in_two_parts(
            advantages["reinforce_plus_plus"], [(floats(reward), lengths, token_rewards)], gamma=gamma, epsilon=1e-4
        )
        assert result.values.tolist() == pytest.approx(whitened_loop(to_go, 1e-4), abs=1e-6)


def test_the_baseline_variant_whitens_centred_rewards_over_tokens() -> None:
    (result,) = in_two_parts(advantages["reinforce_plus_plus_baseline"], [(floats([0.5, -0.5]), torch.tensor([1, 3]))])
    assert result.values.tolist() == pytest.approx(whitened_loop([[0.5], [-0.5, -0.5, -0.5]]))


def test_distillation_advantage_is_the_log_ratio_of_teacher_to_student() -> None:
    rollout, old, teacher = ragged([[-1.0], [-2.0]]), ragged([[-1.5], [-2.5]]), ragged([[-0.5], [-4.0]])
    assert adv.distillation(rollout, teacher).tolist() == [[0.5], [-2.0]]
    assert adv.distillation(rollout, teacher, old).tolist() == [[1.0], [-1.5]]


@given(ragged_rows(), st.floats(0, 10))
def test_safe_rlhf_weighs_reward_against_cost(rows: list[list[float]], multiplier: float) -> None:
    reward, cost = ragged(rows), ragged([[-0.5 * x + 1 for x in row] for row in rows])
    result = adv.safe_rlhf(reward, cost, torch.zeros(len(rows)), state={"multiplier": multiplier})
    expected = [
        (a - multiplier * c) / (1 + multiplier)
        for a, c in zip(reward.values.tolist(), cost.values.tolist(), strict=True)
    ]
    assert result.values.tolist() == pytest.approx(expected)


covariances = st.floats(-100, 100, allow_nan=False)


@given(ragged_rows(st.floats(-4, -0.01), min_len=1), st.integers(0, 5), st.data())
def test_covariance_is_centred_on_the_means_of_the_whole_batch(rows: list[list[float]], cut: int, data: Any) -> None:
    advantage = data.draw(st.lists(st.integers(-2, 2).map(float), min_size=len(rows), max_size=len(rows)))
    of_token = [a for row, a in zip(rows, advantage, strict=True) for _ in row]
    flat = [x for row in rows for x in row]
    mean, mean_advantage = statistics.fmean(flat), statistics.fmean(of_token)
    expected = [(x - mean) * (a - mean_advantage) for x, a in zip(flat, of_token, strict=True)]
    pieces = [(ragged(rows[part]), None, floats(advantage[part])) for part in (slice(0, cut), slice(cut, None))]
    results = in_two_parts(shapes["covariance"], pieces)
    assert Ragged.cat(results).values.tolist() == pytest.approx(expected, abs=1e-9)


@given(ragged_rows(covariances, min_len=1), st.floats(0.01, 1), st.integers(0, 5))
def test_highest_covariance_takes_the_batchs_top_tokens_within_one_bin(
    rows: list[list[float]], fraction: float, cut: int
) -> None:
    pieces = [(ragged(part),) for part in (rows[:cut], rows[cut:])]
    chosen = Ragged.cat(in_two_parts(shapes["highest_covariance"], pieces, fraction=fraction)).values.tolist()
    flat = [x for row in rows for x in row]
    expected = min(-(-len(flat) * fraction // 1), sum(x > 1e-6 for x in flat))
    assert sum(chosen) >= expected
    taken = [x for x, c in zip(flat, chosen, strict=True) if c]
    left = [x for x, c in zip(flat, chosen, strict=True) if not c]
    if taken and left:
        assert min(taken) > max(left)
    if taken:
        clearly_above = [x for x in taken if x > min(taken) * 1.003]
        assert len(clearly_above) < max(expected, 1)


def test_covariance_bounds_exclude_tokens() -> None:
    columns = (ragged([[0.5, 2.0, 3.0, 7.0]]),)
    (chosen,) = in_two_parts(shapes["highest_covariance"], [columns], fraction=0.25, low=1.0, high=5.0)
    assert chosen.values.tolist() == [0, 0, 1, 0]

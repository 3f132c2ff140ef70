"""Length penalties, masks and the KL penalty in the reward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms import shaping
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import shapes
from tests.algorithms.batches import floats, ragged, ragged_rows


@given(st.floats(0.05, 0.95), st.integers(0, 3))
def test_a_rating_settles_where_it_promises_the_share_of_points_that_is_won(share: float, idle: int) -> None:
    rating = {"rating": 0.0}
    for _ in range(400):
        rating = shaping.next_rating(rating, {"points": 10 * share, "games": 10.0})
        assert shaping.next_rating(rating, {"points": 0.0, "games": 0.0}) == rating, "no game, no change"
    assert shaping.expected_points(rating["rating"]) == pytest.approx(share, abs=1e-3)
    scores, played = torch.tensor([2.0, 0.0, -1.0, 5.0]), torch.tensor([3, 1, 2, 0])
    sums = shaping.game_sums(scores, played, torch.tensor([1.0] * (4 - idle) + [0.0] * idle))
    kept = list(zip((1.0, 0.5, 0.0), (played > 0).tolist(), strict=False))[: 4 - idle]
    assert (float(sums["points"]), float(sums["games"])) == (sum(p for p, _ in kept), sum(g for _, g in kept))


def punishment(length: int, longest: int, cache: int) -> float:
    if length <= longest - cache:
        return 0.0
    return ((longest - cache) - length) / cache if length <= longest else -1.0


@given(st.lists(st.integers(0, 60), min_size=1), st.integers(1, 20), st.integers(0, 20))
def test_overlong_penalty_is_dapos_three_cases(lengths: list[int], cache: int, expected: int) -> None:
    longest = cache + expected
    reward = torch.ones(len(lengths), dtype=torch.float64)
    result = shaping.overlong_penalty(reward, torch.tensor(lengths), max_response_tokens=longest, cache=cache)
    assert result.tolist() == pytest.approx([1 + punishment(n, longest, cache) for n in lengths])


def test_dapos_published_lengths_start_the_penalty_at_16384_and_end_it_at_20480() -> None:
    lengths = torch.tensor([16_384, 18_432, 20_480, 30_000])
    result = shaping.overlong_penalty(torch.zeros(4), lengths, max_response_tokens=20_480, cache=4_096)
    assert result.tolist() == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("cache", [0, 11])
def test_an_overlong_cache_above_the_limit_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match="between 1 and max_response_tokens"):
        shaping.overlong_penalty(torch.zeros(1), torch.ones(1), max_response_tokens=10, cache=cache)


def test_overlong_filter_masks_rows_cut_off_and_keeps_earlier_masks() -> None:
    reasons = torch.tensor([0, 1, 2, 0])
    assert shaping.overlong_filter(reasons).tolist() == [1, 0, 1, 1]
    assert shaping.overlong_filter(reasons, torch.tensor([1.0, 1.0, 1.0, 0.0])).tolist() == [1, 0, 1, 0]
    loss, statistics = shaping.overlong_exclude(reasons, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert (loss.tolist(), statistics.tolist()) == ([1, 0, 1, 0], [1, 0, 1, 1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@given(rows=ragged_rows(), coef=st.floats(0, 2))
def test_kl_penalty_is_taken_at_every_token_and_the_reward_given_once(
    estimator: str, rows: list[list[float]], coef: float
) -> None:
    policy, reference = ragged(rows), ragged([[0.5 * x - 0.2 for x in row] for row in rows])
    reward = [float(i) for i in range(len(rows))]
    result = shaping.kl_penalty(floats(reward), policy, reference, coef=coef, estimator=estimator)
    for i, row in enumerate(rows):
        kl = shaping.estimate(estimator, policy[i], reference[i]).tolist()
        expected = [-coef * k + (reward[i] if t == len(row) - 1 else 0.0) for t, k in enumerate(kl)]
        assert result[i].tolist() == pytest.approx(expected)


def test_kl_penalty_prefers_the_trainers_log_probs() -> None:
    rollout, old, reference = ragged([[9.0]]), ragged([[1.0]]), ragged([[0.0]])
    assert shaping.kl_penalty(floats([0.0]), rollout, reference, old, coef=1.0).tolist() == [[-1.0]]
    assert shaping.kl_penalty(floats([0.0]), rollout, reference, coef=1.0).tolist() == [[-9.0]]


@given(ragged_rows(min_len=1), st.floats(0, 5))
def test_safe_rlhf_splits_kl_between_reward_and_cost_for_any_multiplier(
    rows: list[list[float]], multiplier: float
) -> None:
    policy, reference = ragged(rows), ragged([[0.5 * x for x in row] for row in rows])
    nothing = floats([0.0] * len(rows))
    rewards, costs = shaping.safe_rlhf_kl_penalty(nothing, nothing, policy, reference, coef=0.4)
    mixed = (rewards.values - multiplier * costs.values) / (1 + multiplier)
    torch.testing.assert_close(mixed, -0.2 * (policy.values - reference.values))


@given(ragged_rows(min_len=1), st.floats(0, 2))
def test_row_kl_penalty_is_the_sum_of_the_penalty_per_token(rows: list[list[float]], coef: float) -> None:
    policy, reference = ragged(rows), ragged([[0.5 * x - 0.1 for x in row] for row in rows])
    reward = torch.linspace(-1, 1, len(rows), dtype=torch.float64)
    whole = shaping.row_kl_penalty(reward, policy, reference, coef=coef)
    per_token = shaping.kl_penalty(reward, policy, reference, coef=coef)
    assert whole.tolist() == pytest.approx(per_token.row_sums().tolist(), abs=1e-9)
    behind = shaping.advantage_kl_penalty(reward, policy, reference, coef=coef)
    for row, (advantage, kl) in enumerate(
        zip(reward.tolist(), (policy.values - reference.values).split(policy.lengths.tolist()), strict=True)
    ):
        expected = [advantage - coef * float(kl[t:].sum()) for t in range(len(kl))]
        assert behind[row].tolist() == pytest.approx(expected, abs=1e-9)


def test_the_adaptive_penalty_uses_and_adapts_its_coefficient() -> None:
    entry = shapes["adaptive_kl_penalty"]
    policy, reference, reward = ragged([[-1.0, -1.0], [-2.0]]), ragged([[-2.0, -3.0], [-2.5]]), torch.zeros(2)
    columns = (reward, policy, reference, None)
    shaped = entry.function(*columns, target=1.0, state={"coef": 0.5})
    assert shaped.tolist() == shaping.kl_penalty(*columns[:3], coef=0.5).tolist()
    assert entry.sums is not None
    parts = [
        entry.sums(
            torch.zeros(1),
            *(Ragged.from_rows([both.tolist()[row]], torch.float64) for both in (policy, reference)),
        )
        for row in range(2)
    ]
    totals = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    assert totals == {"kl": 3.5, "rows": 2.0}
    assert entry.update_state is not None
    assert entry.update_state({"coef": 0.5}, totals, target=1.0) == {"coef": pytest.approx(0.5 * (1 + 0.1 * 0.2))}
    assert entry.update_state({"coef": 0.5}, totals, target=1.75) == {"coef": 0.5}

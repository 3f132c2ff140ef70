"""GAE and related estimators match the definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.registry import advantages
from braidrl.algorithms.token_advantages import at_row_end, decoupled_gae, gae, sums_to_go
from tests.algorithms.batches import floats, ragged, ragged_rows

unit = st.floats(0, 1)


def gae_loop(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """Return Σ_l (γλ)^l·δ_{t+l}, computed as a sum."""
    delta = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t in range(len(values))
    ]
    return [sum((gamma * lam) ** step * d for step, d in enumerate(delta[t:])) for t in range(len(values))]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def end_rewards(values: list[list[float]], reward: list[float]) -> list[list[float]]:
    return [[0.0] * (len(row) - 1) + [r] if row else [] for row, r in zip(values, reward, strict=True)]


@given(ragged_rows(), st.data(), unit, unit)
def test_gae_is_the_sum_of_discounted_residuals(rows, data, gamma: float, lam: float) -> None:
    reward = data.draw(st.lists(st.floats(-2, 2), min_size=len(rows), max_size=len(rows)))
    advantages, returns = gae(ragged(rows), floats(reward), gamma=gamma, lam=lam)
    expected = flat([gae_loop(v, r, gamma, lam) for v, r in zip(rows, end_rewards(rows, reward), strict=True)])
    assert advantages.values.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.values.tolist() == pytest.approx(
        [a + v for a, v in zip(expected, flat(rows), strict=True)], abs=1e-9
    )


@given(ragged_rows(), st.data(), unit, unit)
def test_token_rewards_replace_the_rows_reward(rows, data, gamma: float, lam: float) -> None:
    rewards = [data.draw(st.lists(st.floats(-2, 2), min_size=len(row), max_size=len(row))) for row in rows]
    result, _ = gae(ragged(rows), torch.full((len(rows),), 99.0), ragged(rewards), gamma=gamma, lam=lam)
    expected = flat([gae_loop(v, r, gamma, lam) for v, r in zip(rows, rewards, strict=True)])
    assert result.values.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_reward_is_given_once_at_the_rows_last_action_token() -> None:
    # Two sequences of two action tokens each are one row of four: the reward must not stand at the end of each
    # sequence.
    values = ragged([[0.0, 0.0, 0.0, 0.0]])
    assert at_row_end(floats([1.0]), values).tolist() == [[0.0, 0.0, 0.0, 1.0]]
    advantages, _ = gae(values, floats([1.0]), gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[0.125, 0.25, 0.5, 1.0]]


@given(ragged_rows())
def test_gamma_and_lambda_of_1_make_every_return_the_reward(rows) -> None:
    reward = floats([float(i) for i in range(len(rows))])
    _, returns = gae(ragged(rows), reward)
    torch.testing.assert_close(returns.values, returns.spread(reward))


@given(ragged_rows(), unit, unit, st.floats(0.5, 3))
def test_gae_is_linear_in_rewards_and_values(rows, gamma: float, lam: float, scale: float) -> None:
    values, reward = ragged(rows), floats([0.3 * i - 1 for i in range(len(rows))])
    once, _ = gae(values, reward, gamma=gamma, lam=lam)
    scaled, _ = gae(values.with_values(values.values * scale), reward * scale, gamma=gamma, lam=lam)
    torch.testing.assert_close(scaled.values, once.values * scale)


@given(ragged_rows(), unit, unit)
def test_gae_of_a_row_is_independent_of_other_rows(rows, gamma: float, lam: float) -> None:
    reward = floats([0.3 * i - 1 for i in range(len(rows))])
    together, _ = gae(ragged(rows), reward, gamma=gamma, lam=lam)
    for i, row in enumerate(rows):
        alone, _ = gae(ragged([row]), reward[i : i + 1], gamma=gamma, lam=lam)
        torch.testing.assert_close(together[i], alone[0])


@given(ragged_rows(), unit, st.floats(0.05, 2))
def test_length_adaptive_gae_has_a_lambda_per_length_and_monte_carlo_returns(rows, gamma: float, alpha: float) -> None:
    reward = [0.3 * i - 1 for i in range(len(rows))]
    advantages, returns = decoupled_gae(ragged(rows), floats(reward), gamma=gamma, alpha=alpha)
    for i, (v, r) in enumerate(zip(rows, end_rewards(rows, reward), strict=True)):
        lam = min(1.0, max(0.0, 1 - 1 / (alpha * len(v)))) if v else 0.0
        assert advantages[i].tolist() == pytest.approx(gae_loop(v, r, gamma, lam), abs=1e-9)
        to_go = [a + x for a, x in zip(gae_loop(v, r, gamma, 1.0), v, strict=True)]
        assert returns[i].tolist() == pytest.approx(to_go, abs=1e-9)


def test_a_given_lambda_of_the_actor_replaces_the_length_adaptive_one() -> None:
    values, reward = ragged([[0.1, 0.2, 0.3]]), floats([1.0])
    torch.testing.assert_close(
        decoupled_gae(values, reward, lam_actor=0.9)[0].values, gae(values, reward, lam=0.9)[0].values
    )


@given(ragged_rows(), unit)
def test_sums_to_go_matches_its_definition(rows, decay: float) -> None:
    result = sums_to_go(ragged(rows), floats([decay * (i % 2) for i in range(len(rows))]))
    for i, row in enumerate(rows):
        d = decay * (i % 2)
        expected = [sum(d**step * x for step, x in enumerate(row[t:])) for t in range(len(row))]
        assert result[i].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_keeps_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    values = ragged([[0.1, 0.2], [0.3]])
    for function in (gae, decoupled_gae):
        for column in function(values.with_values(values.values.to(dtype)), torch.ones(2)):
            assert column.values.dtype == dtype


def test_cost_gae_is_gae_on_the_cost_columns() -> None:
    entry = advantages["cost_gae"]
    assert entry.function is gae
    assert [entry.column(c) for c in (*entry.reads, *entry.optional)] == ["cost_values", "cost", "cost_token_rewards"]
    assert entry.writes == ("cost_advantages", "cost_returns")

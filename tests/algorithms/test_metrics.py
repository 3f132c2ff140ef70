"""Reported numbers match their definitions."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms import policy_metrics
from braidrl.algorithms.registry import losses
from tests.algorithms.batches import floats, grouped, loss_columns

successes = st.sampled_from([0.0, 1.0])


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2))
def test_explained_variance_follows_from_metrics_of_the_value_loss(pairs: list[tuple[float, float]]) -> None:
    values, returns = (floats([p[i] for p in pairs]) for i in (0, 1))
    spread = statistics.pvariance(returns.tolist())
    if spread < 1e-3:
        return
    _, of_tokens = losses["value"].function(values, values, returns)
    means = {name: of_tokens[name].mean() for name in ("error", "error_squared", "returns", "returns_squared")}
    expected = 1 - statistics.pvariance((returns - values).tolist()) / spread
    assert policy_metrics.explained_variance(**means).item() == pytest.approx(expected, abs=1e-6)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant() -> None:
    returns = floats([1.0, 2.0, 4.0])
    for values, expected in ((returns, 1.0), (torch.full_like(returns, 7.0), 0.0)):
        _, m = losses["value"].function(values, values, returns)
        means = {name: m[name].mean() for name in ("error", "error_squared", "returns", "returns_squared")}
        assert policy_metrics.explained_variance(**means).item() == pytest.approx(expected)


@given(st.lists(st.floats(0.01, 10), min_size=1))
def test_effective_sample_size_lies_between_one_sample_and_all(weights: list[float]) -> None:
    share = policy_metrics.effective_sample_share(floats(weights).mean(), (floats(weights) ** 2).mean()).item()
    assert share == pytest.approx(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_effective_sample_size_of_no_weight_is_0() -> None:
    assert policy_metrics.effective_sample_share(torch.zeros(()), torch.zeros(())).item() == 0.0


@given(grouped(successes))
def test_shares_of_groups_count_prompts_and_not_rows(batch: tuple[list[float], list[int]]) -> None:
    correct, groups = batch
    result = policy_metrics.group_shares(floats(correct), floats(correct), torch.tensor(groups))
    of_group = [[c for c, g in zip(correct, groups, strict=True) if g == n] for n in set(groups)]
    assert result["all_correct_fraction"].item() == pytest.approx(statistics.fmean(all(g) for g in of_group))
    assert result["all_wrong_fraction"].item() == pytest.approx(statistics.fmean(not any(g) for g in of_group))
    assert result["no_signal_fraction"].item() == pytest.approx(statistics.fmean(len(set(g)) == 1 for g in of_group))


def test_wrong_answers_of_different_rewards_are_a_signal() -> None:
    shares = policy_metrics.group_shares(floats([0, 0, 0, 0]), floats([0.2, 0.4, 0.3, 0.3]), torch.tensor([1, 1, 2, 2]))
    assert {name: share.item() for name, share in shares.items()} == {
        "all_correct_fraction": 0.0,
        "all_wrong_fraction": 0.5,
        "no_signal_fraction": 0.5,
    }


@given(grouped(successes))
def test_avg_at_k_is_the_mean_over_prompts(batch: tuple[list[float], list[int]]) -> None:
    correct, groups = batch
    of_group = [[c for c, g in zip(correct, groups, strict=True) if g == n] for n in set(groups)]
    result = policy_metrics.avg_at_k(floats(correct), torch.tensor(groups)).item()
    assert result == pytest.approx(statistics.fmean(statistics.fmean(g) for g in of_group))


@given(st.lists(st.lists(successes, min_size=3, max_size=6), min_size=1, max_size=3), st.integers(1, 3))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_success(groups: list[list[float]], k: int) -> None:
    correct = [c for group in groups for c in group]
    numbers = [n for n, group in enumerate(groups) for _ in group]
    expected = statistics.fmean(statistics.fmean(max(s) for s in itertools.combinations(group, k)) for group in groups)
    assert policy_metrics.pass_at_k(floats(correct), torch.tensor(numbers), k).item() == pytest.approx(expected)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match=r"pass@4 .* 4 samples .* 3"):
        policy_metrics.pass_at_k(torch.ones(3), torch.zeros(3, dtype=torch.int64), 4)


def test_mean_probability_of_clipped_tokens_follows_from_clip_metrics() -> None:
    columns = loss_columns(3, pairs=20)
    entry = losses["clip"]
    _, m = entry.function(*(columns[c] for c in entry.reads), low=0.1, high=0.1)
    clipped = m["clip_fraction_high"] > 0
    probability = columns["log_probs"].exp()[clipped]
    result = policy_metrics.mean_where(m["clip_high_probability"].mean(), m["clip_fraction_high"].mean())
    assert result.item() == pytest.approx(probability.mean().item())
    assert m["clip_high_probability_max"].max().item() == pytest.approx(probability.max().item())
    assert policy_metrics.mean_where(torch.tensor(0.0), torch.tensor(0.0)).item() == 0.0


def test_reflection_phrases_are_counted_as_words_in_any_case() -> None:
    texts = ["Wait, wait. Let me check: no", "waiting waits await", "", "On second thought, however"]
    phrases = ["wait", "let me check", "on second thought", "however"]
    assert policy_metrics.reflection_counts(texts, phrases).tolist() == [3, 0, 0, 2]
    assert policy_metrics.reflection_counts(["a.b axb"], ["a.b"]).tolist() == [1]
    assert policy_metrics.reflection_counts(["anything"], []).tolist() == [0]


def test_metrics_of_an_empty_batch_are_0() -> None:
    nothing, numbers = floats([]), torch.tensor([], dtype=torch.int64)
    assert policy_metrics.avg_at_k(nothing, numbers) == 0
    assert all(share == 0 for share in policy_metrics.group_shares(nothing, nothing, numbers).values())

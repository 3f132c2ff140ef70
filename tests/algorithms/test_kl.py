"""KL estimators: formulas, expectations, and the controllers of the coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.kl import estimate
from braidrl.algorithms.registry import divergences
from braidrl.algorithms.shaping import next_kl_coefficient
from braidrl.algorithms.token_advantages import next_multiplier

FORMULAS = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x * x,
    "k3": lambda x: math.exp(-x) - (-x) - 1,
    "abs": abs,
}


@pytest.mark.parametrize("name", list(divergences))
@given(x=st.floats(-5, 5))
def test_a_kl_estimator_matches_its_formula_with_and_without_plus(name: str, x: float) -> None:
    value = estimate(name, torch.tensor([x - 1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert value.item() == pytest.approx(FORMULAS[name.removesuffix("+")](x), abs=1e-9)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_of_k1_and_k3_is_the_divergence(name: str) -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double().log(), torch.tensor([0.2, 0.2, 0.6]).double().log()
    divergence = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimate(name, policy, reference)).sum(), divergence)


def test_expected_gradient_of_plus_variants_is_the_divergences() -> None:
    reference = torch.tensor([0.2, 0.2, 0.6]).double().log()

    def gradient(name: str | None) -> torch.Tensor:
        logits = torch.tensor([0.3, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
        policy = logits.log_softmax(0)
        exact = (policy.exp() * (policy - reference)).sum()
        total = exact if name is None else (policy.exp().detach() * estimate(name, policy, reference)).sum()
        return torch.autograd.grad(total, logits)[0]

    for name in ("k2", "k1+", "k2+", "k3+", "abs+"):
        torch.testing.assert_close(gradient(name), gradient(None))
    torch.testing.assert_close(gradient("k1"), torch.zeros(3, dtype=torch.float64))
    assert (gradient("k3") - gradient(None)).abs().max() > 0.05


def test_k3_is_finite_for_a_token_far_likelier_under_the_reference() -> None:
    assert torch.isfinite(estimate("k3", torch.tensor([-1000.0]), torch.tensor([0.0]))).all()


def test_an_unknown_estimator_is_refused_with_the_most_similar_name() -> None:
    with pytest.raises(KeyError, match="Did you mean 'k3'"):
        estimate("k33", torch.zeros(1), torch.zeros(1))


def test_the_adaptive_coefficient_rises_with_high_kl_by_at_most_2_percent() -> None:
    for kl, expected in ((6.0, 0.1), (60.0, 0.102), (0.0, 0.098), (6.6, 0.101)):
        result = next_kl_coefficient({"coef": 0.1}, {"kl": 2 * kl, "rows": 2}, target=6.0)
        assert result == pytest.approx({"coef": expected})


def test_safe_rlhfs_multiplier_rises_above_the_limit_and_never_falls_below_0() -> None:
    for before, cost, expected in ((1.0, 0.7, 1.02), (0.01, -0.5, 0.0)):
        result = next_multiplier(
            {"multiplier": before}, {"cost": 2 * cost, "rows": 2}, threshold=0.5, learning_rate=0.1
        )
        assert result == pytest.approx({"multiplier": expected})

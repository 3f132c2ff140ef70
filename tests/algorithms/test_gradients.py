"""Gradients of every loss and KL estimator match finite differences in float64.

A loss with a stop-gradient is not the derivative of its own value. For such a loss the stopped parts are held constant,
and the difference is taken over the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import braidrl.algorithms.library
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import divergences, losses
from tests.algorithms.batches import built_in, loss_columns

SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"low": 0.2, "high": 0.28, "dual": 3.0},
    "gspo": {"low": 0.05, "high": 0.1},
    "gmpo": {"low": 0.1, "high": 0.2},
    "decoupled": {"cap": 1.1},
    "dppo_tv": {"delta": 0.05},
}
TRAINED = {"value": "values", "bradley_terry": "scores"}


def frozen_cispo(columns: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    weight = (columns["log_probs"] - columns["old_log_probs"]).exp().clamp(0, 5) * columns["advantages"]
    return lambda log_probs: -(weight * log_probs)


def frozen_distillation(columns: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    gap = columns["ref_log_probs"] - columns["log_probs"]
    return lambda log_probs: -(gap * log_probs)


def frozen_gspo(columns: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    start = columns["log_probs"].clone()
    rows = Ragged(start - columns["old_log_probs"], columns["offsets"])
    mean = rows.spread(rows.row_means()).exp()

    def loss(log_probs: Tensor) -> Tensor:
        s = mean * (log_probs - start).exp()
        a = columns["advantages"]
        return -torch.minimum(s * a, s.clamp(0.95, 1.1) * a)

    return loss


FROZEN = {"cispo": frozen_cispo, "distillation": frozen_distillation, "gspo": frozen_gspo}


def central_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Return d(Σ function)/d(at), one entry at a time."""
    slopes = []
    for i in range(len(at)):
        shift = torch.zeros_like(at)
        shift[i] = step
        slopes.append((function(at + shift).sum() - function(at - shift).sum()) / (2 * step))
    return torch.stack(slopes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(built_in(losses)))
def test_gradient_of_a_loss_matches_finite_differences(name: str, seed: int) -> None:
    assert braidrl.algorithms.library
    columns, entry = loss_columns(seed), losses[name]
    trained = TRAINED.get(name, "log_probs")

    def loss_of(x: Tensor) -> Tensor:
        moved = columns | {trained: x}
        return entry.function(*(moved[c] for c in entry.reads), **SETTINGS.get(name, {}))[0]

    at = columns[trained].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(at).sum(), at)
    expected = central_differences(FROZEN[name](columns) if name in FROZEN else loss_of, columns[trained])
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", [name for name in built_in(losses) if name not in FROZEN])
def test_losses_pass_gradcheck_of_autograd(name: str) -> None:
    columns, entry = loss_columns(9), losses[name]
    trained = TRAINED.get(name, "log_probs")
    at = columns[trained].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: entry.function(*((columns | {trained: x})[c] for c in entry.reads), **SETTINGS.get(name, {}))[0], at
    )


@pytest.mark.parametrize("name", list(built_in(divergences)))
def test_gradient_of_a_kl_estimator_matches_finite_differences_and_plus_matches_k2(name: str) -> None:
    columns = loss_columns(4)
    of = divergences["k2" if name.endswith("+") else name].function
    at = columns["log_probs"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergences[name].function(at, columns["ref_log_probs"]).sum(), at)
    expected = central_differences(lambda x: of(x, columns["ref_log_probs"]), columns["log_probs"])
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)

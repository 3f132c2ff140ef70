"""Every loss matches a plain loop over tokens, written from its formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import braidrl.algorithms.library
from braidrl.algorithms.registry import losses
from tests.algorithms.batches import built_in, loss_columns

SEEDS = range(4)
Columns = dict[str, Any]


def call(name: str, columns: Columns, **settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    entry = losses[name]
    return entry.function(*(columns[c] for c in (*entry.reads, *entry.optional)), **settings)


def rows_of(columns: Columns) -> list[list[int]]:
    """Return the token indices of each row."""
    ends = columns["offsets"].tolist()
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def surrogate(r: float, a: float, low: float, high: float) -> float:
    return -min(r * a, clamp(r, 1 - low, 1 + high) * a)


def per_token(f: Callable[..., float], *names: str) -> Callable[[Columns], list[float]]:
    return lambda c: [f(*numbers) for numbers in zip(*(c[name].tolist() for name in names), strict=True)]


def dual_clip(lp: float, old: float, a: float) -> float:
    loss = surrogate(math.exp(lp - old), a, 0.05, 0.1)
    return min(loss, -1.2 * a) if a < 0 else loss


def cispo(lp: float, old: float, a: float) -> float:
    return -clamp(math.exp(lp - old), 0.8, 1.3) * a * lp


def sapo(lp: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(lp - old) - 1))) * a


def dppo(lp: float, mu: float, a: float) -> float:
    moved = math.exp(lp) - math.exp(mu)
    dropped = (a > 0 and moved > 0.05) or (a < 0 and moved < -0.05)
    return 0.0 if dropped else -math.exp(lp - mu) * a


def decoupled(lp: float, prox: float, behaviour: float, a: float) -> float:
    return min(math.exp(prox - behaviour), 1.1) * surrogate(math.exp(lp - prox), a, 0.2, 0.2)


def decoupled_masked(lp: float, prox: float, behaviour: float, a: float) -> float:
    w = math.exp(prox - behaviour)
    return 0.0 if w > 1.1 else w * surrogate(math.exp(lp - prox), a, 0.2, 0.2)


def clip_cov(lp: float, old: float, a: float, high: float) -> float:
    return 0.0 if high else surrogate(math.exp(lp - old), a, 0.2, 0.2)


def kl_cov(lp: float, old: float, a: float, high: float) -> float:
    return -math.exp(lp - old) * a + (0.5 * abs(lp - old) if high else 0.0)


def value(v: float, old: float, target: float) -> float:
    return 0.5 * max((v - target) ** 2, (old + clamp(v - old, -0.3, 0.3) - target) ** 2)


def gspo(c: Columns) -> list[float]:
    loss = [0.0] * len(c["log_probs"])
    for row in rows_of(c):
        s = math.exp(sum(float(c["log_probs"][t] - c["old_log_probs"][t]) for t in row) / len(row))
        for t in row:
            loss[t] = surrogate(s, float(c["advantages"][t]), 0.05, 0.1)
    return loss


def gmpo(c: Columns) -> list[float]:
    loss = [0.0] * len(c["log_probs"])
    for row in rows_of(c):
        a = sum(float(c["advantages"][t]) for t in row) / len(row)
        product = 1.0
        for t in row:
            r = math.exp(float(c["log_probs"][t] - c["old_log_probs"][t]))
            product *= min(r, math.exp(0.2)) if a > 0 else max(r, math.exp(-0.1))
        for t in row:
            loss[t] = -a * product ** (1 / len(row))
    return loss


def pairs(scores: list[float]) -> list[float]:
    """Return −log σ(chosen − rejected) at both rows; rows 2i and 2i + 1 are a pair."""
    return [math.log1p(math.exp(-(scores[r - r % 2] - scores[r - r % 2 + 1]))) for r in range(len(scores))]


def dpo(c: Columns) -> list[float]:
    rows = rows_of(c)
    sums = [0.3 * sum(float(c["log_probs"][t] - c["ref_log_probs"][t]) for t in row) for row in rows]
    return [loss for row, loss in zip(rows, pairs(sums), strict=True) for _ in row]


PPO = ("log_probs", "old_log_probs", "advantages")
CASES: list[tuple[str, dict[str, Any], Callable[[Columns], list[float]]]] = [
    (
        "clip",
        {"low": 0.2, "high": 0.28},
        per_token(lambda lp, old, a: surrogate(math.exp(lp - old), a, 0.2, 0.28), *PPO),
    ),
    ("clip", {"low": 0.05, "high": 0.1, "dual": 1.2}, per_token(dual_clip, *PPO)),
    ("cispo", {"low": 0.2, "high": 0.3}, per_token(cispo, *PPO)),
    ("sapo", {}, per_token(sapo, *PPO)),
    ("reinforce", {}, per_token(lambda lp, a: -a * lp, "log_probs", "advantages")),
    ("sft", {}, per_token(lambda lp: -lp, "log_probs")),
    ("ptx", {}, per_token(lambda lp: -lp, "log_probs")),
    ("distillation", {}, per_token(lambda lp, ref: -(ref - lp) * lp, "log_probs", "ref_log_probs")),
    ("dppo_tv", {"delta": 0.05}, per_token(dppo, "log_probs", "rollout_log_probs", "advantages")),
    ("decoupled", {"cap": 1.1}, per_token(decoupled, "log_probs", "old_log_probs", "rollout_log_probs", "advantages")),
    (
        "decoupled",
        {"cap": 1.1, "over_cap": "mask"},
        per_token(decoupled_masked, "log_probs", "old_log_probs", "rollout_log_probs", "advantages"),
    ),
    ("clip_cov", {}, per_token(clip_cov, *PPO, "high_covariance")),
    ("kl_cov", {"coef": 0.5}, per_token(kl_cov, *PPO, "high_covariance")),
    ("value", {"clip": 0.3}, per_token(value, "values", "old_values", "returns")),
    ("value", {"clip": None}, per_token(lambda v, target: 0.5 * (v - target) ** 2, "values", "returns")),
    ("gspo", {"low": 0.05, "high": 0.1}, gspo),
    ("gmpo", {"low": 0.1, "high": 0.2}, gmpo),
    ("dpo", {"beta": 0.3}, dpo),
    ("bradley_terry", {}, lambda c: pairs(c["scores"].tolist())),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "settings", "loop"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_loss_matches_its_formula(
    name: str, settings: dict[str, Any], loop: Callable[..., list[float]], seed: int
) -> None:
    columns = loss_columns(seed)
    loss, _ = call(name, columns, **settings)
    assert loss.tolist() == pytest.approx(loop(columns), abs=1e-12)


def test_every_registered_loss_has_a_case_here() -> None:
    assert braidrl.algorithms.library and {case[0] for case in CASES} == set(built_in(losses))


@pytest.mark.parametrize("name", list(built_in(losses)))
def test_metrics_are_detached_numbers_for_each_entry_of_the_loss(name: str) -> None:
    columns = loss_columns(0)
    for trained in ("log_probs", "values", "scores"):
        columns[trained].requires_grad_()
    loss, metrics = call(name, columns)
    assert loss.requires_grad and all(m.shape == loss.shape and not m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(built_in(losses)))
def test_a_loss_keeps_the_dtype_of_its_columns(name: str, dtype: torch.dtype) -> None:
    loss, metrics = call(name, loss_columns(1, dtype))
    assert {loss.dtype, *(m.dtype for m in metrics.values())} == {dtype}
    torch.testing.assert_close(loss.double(), call(name, loss_columns(1))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(built_in(losses)))
def test_an_empty_micro_batch_has_an_empty_loss(name: str) -> None:
    columns = loss_columns(0, pairs=0)
    loss, _ = call(name, columns)
    assert loss.shape == (0,)


def test_clip_metrics_mark_tokens_without_gradient() -> None:
    columns = loss_columns(3, pairs=20)
    columns["log_probs"].requires_grad_()
    loss, metrics = call("clip", columns, low=0.1, high=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), columns["log_probs"])
    r = (columns["log_probs"] - columns["old_log_probs"]).detach().exp()
    assert torch.equal(metrics["clip_fraction"] > 0, gradient == 0)
    assert torch.equal(metrics["clip_fraction_high"] > 0, (gradient == 0) & (r > 1))
    assert torch.equal(metrics["clip_fraction_low"] > 0, (gradient == 0) & (r < 1))
    above = metrics["clip_fraction_high"] > 0
    assert above.any() and torch.equal(
        metrics["clip_high_probability"][above], columns["log_probs"].detach().exp()[above]
    )
    assert (metrics["clip_high_probability"][~above] == 0).all()
    assert (metrics["kl_old"] >= 0).all()


def test_clip_higher_keeps_gradients_that_a_symmetric_clip_removes() -> None:
    columns = loss_columns(0) | {
        "log_probs": torch.tensor([math.log(0.125)]),
        "old_log_probs": torch.tensor([math.log(0.1)]),
    }
    columns["advantages"] = torch.ones(1)
    assert call("clip", columns)[1]["clip_fraction_high"].item() == 1
    assert call("clip", columns, high=0.28)[1]["clip_fraction_high"].item() == 0


@pytest.mark.parametrize("name", ["clip", "cispo", "sapo", "gspo", "gmpo", "decoupled", "dppo_tv", "kl_cov"])
def test_an_extreme_ratio_gives_finite_losses(name: str) -> None:
    columns = loss_columns(0)
    columns["log_probs"] = (columns["log_probs"] + 1000).requires_grad_()
    columns["advantages"][0] = 0.0
    loss, metrics = call(name, columns)
    (gradient,) = torch.autograd.grad(loss.sum(), columns["log_probs"])
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert torch.isfinite(metrics["kl_old"]).all()


def test_on_policy_losses_have_the_gradient_of_reinforce() -> None:
    columns = loss_columns(2)
    columns["log_probs"].requires_grad_()
    expected = -columns["advantages"]
    for name in ("clip", "cispo", "gspo", "decoupled", "dppo_tv", "sapo"):
        same = columns | dict.fromkeys(("old_log_probs", "rollout_log_probs"), columns["log_probs"].detach())
        (gradient,) = torch.autograd.grad(call(name, same)[0].sum(), columns["log_probs"])
        torch.testing.assert_close(gradient, expected)


def test_reinforce_with_every_advantage_1_is_sft_in_value_and_gradient() -> None:
    columns = loss_columns(5)
    columns["log_probs"].requires_grad_()
    columns["advantages"] = torch.ones_like(columns["advantages"])
    results = [call(name, columns)[0] for name in ("reinforce", "sft")]
    assert torch.equal(results[0], results[1])
    gradients = [torch.autograd.grad(loss.sum(), columns["log_probs"])[0] for loss in results]
    assert torch.equal(gradients[0], gradients[1])


def test_an_incomplete_preference_pair_is_refused() -> None:
    columns = loss_columns(0)
    for group, sample in (([1, 2], [0, 1]), ([1, 1], [0, 0]), ([1, 1, 1], [0, 1, 2])):
        part = columns | {"group": torch.tensor(group), "sample": torch.tensor(sample)}
        part["scores"] = columns["scores"][: len(group)]
        with pytest.raises(ValueError, match="preference pair"):
            call("bradley_terry", part)


def test_pair_metrics_averaged_over_rows_are_means_over_pairs() -> None:
    columns = loss_columns(7)
    _, metrics = call("bradley_terry", columns)
    chosen, rejected = columns["scores"][0::2], columns["scores"][1::2]
    assert metrics["accuracy"].mean().item() == pytest.approx((chosen > rejected).double().mean().item())
    assert metrics["margin"].mean().item() == pytest.approx((chosen - rejected).mean().item())
    assert metrics["chosen"].mean().item() == pytest.approx(chosen.mean().item())
    assert metrics["rejected"].mean().item() == pytest.approx(rejected.mean().item())


def test_the_value_loss_reads_the_critics_earlier_values_under_their_column_name() -> None:
    assert losses["value"].column("old_values") == "values"


def test_a_value_within_its_range_is_not_counted_as_clipped() -> None:
    old, values = torch.full((1000,), 0.03), torch.linspace(-0.06, 0.12, 1000)
    returns = torch.linspace(-0.5, 0.5, 7).repeat(143)[:1000]
    _, metrics = losses["value"].function(values, old, returns, clip=0.2)
    assert not metrics["clip_fraction"].any()
    _, metrics = losses["value"].function(values, old, returns, clip=0.05)
    assert 0 < metrics["clip_fraction"].mean() < 0.5

"""The optimizer divides sums once, keeps small steps in master weights, applies schedules and clipping, and restores
its state.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from braidrl.config import TrainerConfig
from braidrl.errors import UserError
from braidrl.training.optimizer import MasterOptimizer, StepOverrides, check_optimizer, learning_rate
from braidrl.training.optimizer_contract import CHECKS, OptimizerUnderTest


def trainer(**given: Any) -> TrainerConfig:
    return TrainerConfig(**{"max_grad_norm": None, "learning_rate": 0.1, **given})


def parameter(*values: float, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def make(p: nn.Parameter, **given: Any) -> MasterOptimizer:
    config = trainer(**given)
    return MasterOptimizer({"weight": p}, config, config.learning_rate)


def backward(optimizer: MasterOptimizer, losses: dict[str, torch.Tensor]) -> None:
    """Add the gradients of loss sums, one scalar per denominator."""
    for name, loss in losses.items():
        optimizer.collect(name)
        loss.backward(retain_graph=True)


def gradient(optimizer: MasterOptimizer, p: nn.Parameter) -> torch.Tensor:
    """Return the gradient of AdamW's first step, whose first moment is (1 − β₁) times it."""
    return optimizer.optimizer.state[optimizer.masters[0]]["exp_avg"] / (1 - optimizer.config.betas[0])


def test_each_sum_is_divided_by_its_count_for_any_accumulation() -> None:
    p = parameter(1.0, 2.0)
    optimizer = make(p)
    backward(optimizer, {"tokens": (p * torch.tensor([3.0, 5.0])).sum(), "rows": p.sum()})
    backward(optimizer, {"tokens": p[0] * 9.0})
    norm = optimizer.step({"tokens": 4.0, "rows": 2.0}, 1)
    expected = torch.tensor([12 / 4 + 1 / 2, 5 / 4 + 1 / 2], dtype=torch.float64)
    torch.testing.assert_close(gradient(optimizer, p), expected)
    assert norm == pytest.approx(float(expected.norm()))
    assert p.grad is None, "no sum is left for the next step"


def test_gradient_sums_are_freed_by_the_step_that_uses_them() -> None:
    p = parameter(1.0, 2.0)
    optimizer = make(p)
    backward(optimizer, {"tokens": p.sum()})
    (held,) = optimizer.sums["tokens"]
    assert held is not None
    storage = ref(held)
    del held
    optimizer.step({"tokens": 1.0}, 1)
    assert storage() is None


def test_zero_count_skips_its_sum_and_all_zero_counts_skip_the_update() -> None:
    p = parameter(1.0)
    optimizer = make(p)
    backward(optimizer, {"tokens": 2 * p.sum(), "groups": 100 * p.sum()})
    optimizer.step({"tokens": 1.0, "groups": 0.0}, 1)
    assert gradient(optimizer, p).item() == pytest.approx(2.0)
    before = p.detach().clone()
    backward(optimizer, {"tokens": 7 * p.sum()})
    assert optimizer.step({"tokens": 0.0}, 2) is None
    assert torch.equal(p, before) and optimizer.steps == 1
    backward(optimizer, {"tokens": p.sum()})
    assert optimizer.step({"tokens": 1.0}, 2) == pytest.approx(1.0), "a skipped step is not applied later"


def test_bfloat16_weights_near_one_move_at_learning_rate_1e_6() -> None:
    p = parameter(1.0, -1.0, dtype=torch.bfloat16)
    optimizer = make(p, learning_rate=1e-6)
    assert (torch.tensor(1.0) - 1e-6).bfloat16() == 1.0, "without a master a bfloat16 weight would not change"
    for iteration in range(1, 6):
        backward(optimizer, {"tokens": p.sum()})
        optimizer.step({"tokens": 1.0}, iteration)
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.tensor([1 - 5e-6, -1 - 5e-6]), rtol=0, atol=5e-7)
    for iteration in range(6, 4101):
        backward(optimizer, {"tokens": p.sum()})
        optimizer.step({"tokens": 1.0}, iteration)
    assert p[0] < 1.0, "many small steps change the weights of the forward pass"


def test_clipping_scales_the_whole_gradient_and_reports_the_norm_before() -> None:
    p = parameter(0.0, 0.0)
    optimizer = make(p, max_grad_norm=1.0)
    backward(optimizer, {"tokens": (p * torch.tensor([30.0, 40.0])).sum()})
    assert optimizer.step({"tokens": 10.0}, 1) == pytest.approx(5.0)
    torch.testing.assert_close(gradient(optimizer, p), torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    p = parameter(1.0)
    optimizer = make(p)
    backward(optimizer, {"tokens": p.sum() * value})
    norm = optimizer.step({"tokens": 1.0}, 1)
    assert norm is not None and not math.isfinite(norm)
    assert p.item() == 1.0 and optimizer.steps == 0
    backward(optimizer, {"tokens": p.sum()})
    assert optimizer.step({"tokens": 1.0}, 1) == pytest.approx(1.0)


def test_schedules_warm_up_and_decay_until_the_last_step() -> None:
    def rates(**given: Any) -> list[float]:
        return [round(learning_rate(i, trainer(steps=6, **given), 1.0), 6) for i in range(1, 8)]

    assert rates() == [1.0] * 7
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(schedule="linear") == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0], abs=1e-6)
    assert rates(schedule="cosine", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_an_optimizer_step_uses_its_iterations_learning_rate() -> None:
    p = parameter(1.0)
    optimizer = make(p, learning_rate=0.4, warmup_steps=4, steps=10)
    backward(optimizer, {"tokens": p.sum()})
    optimizer.step({"tokens": 1.0}, 1)
    assert p.item() == pytest.approx(1 - 0.1), "AdamW's first step is the rate itself"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_restored_optimizer_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def train(optimizer: MasterOptimizer, p: nn.Parameter, iterations: range) -> None:
        for iteration in iterations:
            backward(optimizer, {"tokens": (p.double() ** 2 * iteration).sum()})
            optimizer.step({"tokens": 3.0}, iteration)

    whole = parameter(0.3, -2.0, dtype=dtype)
    first = make(whole, weight_decay=0.1)
    train(first, whole, range(1, 4))
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    resumed = nn.Parameter(whole.detach().clone())
    second = make(resumed, weight_decay=0.1)
    second.load_state(saved)
    train(first, whole, range(4, 7))
    train(second, resumed, range(4, 7))
    assert torch.equal(whole, resumed) and torch.equal(first.masters[0], second.masters[0])
    assert second.steps == 6


def test_frozen_parameters_are_left_alone() -> None:
    frozen, p = parameter(1.0), parameter(1.0)
    frozen.requires_grad_(False)
    optimizer = MasterOptimizer({"frozen": frozen, "p": p}, trainer(), 0.1)
    backward(optimizer, {"tokens": (frozen * p).sum()})
    optimizer.step({"tokens": 1.0}, 1)
    assert frozen.item() == 1.0 and p.item() != 1.0


def test_unused_optimizer_and_weights_are_garbage_collected() -> None:
    p = parameter(1.0)
    optimizer = make(p)
    backward(optimizer, {"tokens": p.sum()})
    optimizer.step({"tokens": 1.0}, 1)
    left = [ref(optimizer), ref(p)]
    del optimizer, p
    gc.collect()
    assert [each() for each in left] == [None, None]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("name", "settings"), [("adamw", {}), ("sgd", {}), ("sgd", {"momentum": 0.9}), ("torch.optim:RMSprop", {})]
)
def test_optimizers_keep_the_contract(
    name: str, settings: dict[str, Any], check: Callable[[OptimizerUnderTest], None]
) -> None:
    check(OptimizerUnderTest(name, settings))


class Forgetful(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__([(name, p) for name, p in parameters if p.dim() > 1], lr=lr)


def test_an_optimizer_that_leaves_a_parameter_out_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match=r"model\.norm\.weight; pass every pair") as caught:
        check_optimizer(trainer(optimizer=f"{__file__}:Forgetful"))
    assert "\n" not in str(caught.value)


class TwoRates(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        matrices = [pair for pair in parameters if pair[1].dim() > 1]
        rest = [pair for pair in parameters if pair[1].dim() == 1]
        super().__init__([{"params": matrices, "lr": 3 * lr}, {"params": rest}], lr=lr)


def test_groups_by_name_and_shape_keep_their_share_of_the_scheduled_rate() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2).double()), parameter(0.0, 0.0)
    config = trainer(optimizer=f"{__file__}:TwoRates", learning_rate=0.4, warmup_steps=4, steps=10)
    optimizer = MasterOptimizer({"matrix": matrix, "vector": vector}, config, config.learning_rate)
    backward(optimizer, {"tokens": matrix.sum() + vector.sum()})
    optimizer.step({"tokens": 1.0}, 1)
    assert matrix[0, 0].item() == pytest.approx(-0.3) and vector[0].item() == pytest.approx(-0.1)


def test_a_step_takes_its_own_rate_betas_and_clipping_and_the_next_the_configured_ones() -> None:
    p, plain = parameter(1.0, 1.0), parameter(1.0, 1.0)
    optimizer, other = make(p, max_grad_norm=1.0), make(plain, learning_rate=0.02, betas=(0.5, 0.6))
    for one, q, overrides in (
        (optimizer, p, StepOverrides(learning_rate=0.02, betas=(0.5, 0.6), max_grad_norm=math.inf)),
        (other, plain, StepOverrides()),
    ):
        backward(one, {"tokens": (q * torch.tensor([30.0, 40.0])).sum()})
        assert one.step({"tokens": 1.0}, 1, overrides) == pytest.approx(50.0)
    assert torch.equal(p, plain)
    torch.testing.assert_close(
        optimizer.optimizer.state[p]["exp_avg"], torch.tensor([15.0, 20.0], dtype=torch.float64), rtol=1e-12, atol=0
    )
    backward(optimizer, {"tokens": p.sum()})
    optimizer.step({"tokens": 1.0}, 2)
    (group,) = optimizer.optimizer.param_groups
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))


def test_an_override_that_the_optimizer_does_not_have_is_refused_in_one_line() -> None:
    p = parameter(1.0)
    optimizer = make(p, optimizer="sgd")
    backward(optimizer, {"tokens": p.sum()})
    with pytest.raises(UserError, match=r"optim_step: betas .*trainer\.optimizer=sgd") as caught:
        optimizer.step({"tokens": 1.0}, 1, StepOverrides(betas=(0.9, 0.99)))
    assert "\n" not in str(caught.value)


def test_optimizer_state_that_cannot_be_sharded_is_refused() -> None:
    p = parameter(1.0, 2.0)
    optimizer = make(p, optimizer="torch.optim:NAdam")
    backward(optimizer, {"tokens": p.sum()})
    optimizer.step({"tokens": 1.0}, 1)
    optimizer.optimizer.state[optimizer.masters[0]]["history"] = [1.0]
    with pytest.raises(UserError, match=r"trainer.optimizer=torch.optim:NAdam .*'history', .*no tensor"):
        optimizer.state()

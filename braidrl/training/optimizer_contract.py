"""The contract of optimizers in `trainer.optimizer`: checks for ours and for those that users write.

    subject = OptimizerUnderTest("optimizer.py:lion", {"beta": 0.9})
    for check in CHECKS:
        check(subject)

A check fails by AssertionError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from braidrl.config import TrainerConfig
from braidrl.training.optimizer import MasterOptimizer, check_optimizer


@dataclass(frozen=True)
class OptimizerUnderTest:
    """An optimizer under test, as a configuration names it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings without weight decay: without a gradient, weights must not change."""
    learning_rate: float = 1e-2

    def make(self, *weights: Tensor, **trainer: Any) -> MasterOptimizer:
        """Return the optimizer of a model with copies of these weights and settings of `trainer`, as in a run."""
        settings = {"optimizer": self.name, "optimizer_settings": dict(self.settings), "max_grad_norm": None, **trainer}
        config = TrainerConfig(learning_rate=self.learning_rate, **settings)
        check_optimizer(config)
        parameters = {f"layers.{n}.weight": nn.Parameter(weight.clone()) for n, weight in enumerate(weights)}
        return MasterOptimizer(parameters, config, self.learning_rate)


def weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((6, 4), (6,))]


def train(optimizer: MasterOptimizer, iterations: Sequence[int], scale: float = 1.0) -> list[Tensor]:
    """Step on half the sum of squares, times `scale`, once for each iteration; return the weights afterwards."""
    for iteration in iterations:
        loss = sum((0.5 * scale * (p.double() ** 2).sum() for p in optimizer.parameters), torch.zeros(()).double())
        optimizer.collect("tokens")
        loss.backward()
        optimizer.step({"tokens": 1.0}, iteration)
    return [p.detach().clone() for p in optimizer.parameters]


def steps_lead_downhill(subject: OptimizerUnderTest) -> None:
    before = weights()
    after = train(subject.make(*before), range(1, 21))
    assert sum((w**2).sum() for w in after) < sum((w**2).sum() for w in before)


def without_a_gradient_weights_stay(subject: OptimizerUnderTest) -> None:
    before = weights()
    after = train(subject.make(*before), range(1, 4), scale=0.0)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def the_scheduled_learning_rate_is_used(subject: OptimizerUnderTest) -> None:
    optimizer = subject.make(*weights(), schedule="linear", steps=3)
    before = train(optimizer, [1, 2, 3])
    # After its last step the schedule's rate is 0.
    after = train(optimizer, [4])
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def bfloat16_weights_move_by_float32_masters(subject: OptimizerUnderTest) -> None:
    optimizer = subject.make(*weights(torch.bfloat16))
    train(optimizer, range(1, 4))
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16())


def a_restored_state_continues_bit_for_bit(subject: OptimizerUnderTest) -> None:
    uninterrupted = subject.make(*weights())
    halfway = train(uninterrupted, range(1, 4))
    saved = {name: tensor.clone() for name, tensor in uninterrupted.state().items()}
    resumed = subject.make(*halfway)
    resumed.load_state(saved)
    for expected, restored in zip(train(uninterrupted, range(4, 7)), train(resumed, range(4, 7)), strict=True):
        assert torch.equal(expected, restored)


def a_shard_of_a_parameter_steps_as_in_the_full_one(subject: OptimizerUnderTest) -> None:
    matrix, vector = weights()
    together = train(subject.make(matrix, vector), range(1, 4))
    parts = [train(subject.make(matrix[rows], vector[rows]), range(1, 4)) for rows in (slice(0, 2), slice(2, 6))]
    for number, full in enumerate(together):
        assert torch.allclose(torch.cat([part[number] for part in parts]), full, rtol=0, atol=1e-12)


CHECKS: tuple[Callable[[OptimizerUnderTest], None], ...] = (
    steps_lead_downhill,
    without_a_gradient_weights_stay,
    the_scheduled_learning_rate_is_used,
    bfloat16_weights_move_by_float32_masters,
    a_restored_state_continues_bit_for_bit,
    a_shard_of_a_parameter_steps_as_in_the_full_one,
)
"""Leave out the last check for an optimizer that needs whole matrices: it gathers those of a DTensor itself."""

"""Attacks by numbers: weights that are not finite are neither saved nor trained on, and a run that learns nothing
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from braidrl.config import TrainerConfig
from braidrl.errors import UserError
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import checkpoints_of, latest_checkpoint
from braidrl.training.optimizer import MasterOptimizer, all_finite
from tests.tiny import Workshop

BROKEN = """
import torch


class Broken(torch.optim.SGD):
    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        Broken.steps += 1
        if Broken.steps == 2:
            self.param_groups[0]["params"][-1].view(-1)[-1] = float("VALUE")
"""


VALUES = ("inf", "-inf", "nan")


@pytest.mark.parametrize("value", VALUES)
def test_infinite_weights_end_the_run_and_the_last_checkpoint_stays(workshop: Workshop, value: str) -> None:
    (workshop.folder / f"broken_{value.strip('-')}{len(value)}.py").write_text(BROKEN.replace("VALUE", value))
    optimizer = f"{workshop.folder}/broken_{value.strip('-')}{len(value)}.py:Broken"
    with pytest.raises(UserError, match="infinite or NaN after an update"):
        workshop.run(trainer={"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 1, "optimizer": optimizer})
    (kept,) = checkpoints_of(workshop.folder / "run")
    assert kept.name == "step-1" and all_finite(load_file(kept / "actor" / "model.safetensors").values())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("inf")]),
        torch.tensor([[float("nan")]]),
        torch.tensor([-float("inf")], dtype=torch.bfloat16),
    ],
)
def test_one_number_that_is_not_finite_is_found_among_all(tensor: torch.Tensor) -> None:
    others = [torch.ones(3), torch.ones(()), torch.empty(0), torch.ones(2, dtype=torch.int64), torch.full((2,), 3e38)]
    assert all_finite(others) and not all_finite([*others, tensor])


PLACES = ("weights", "moments", "parts")


@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_with_a_number_that_is_not_finite_takes_no_place(workshop: Workshop, name: str) -> None:
    trainer = {"steps": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "checkpoint_async": name == "parts"}
    with TrainingRun(workshop.config(trainer=trainer)) as run:
        run.train()
        worker = run.backend.executor.workers["actor"]  # type: ignore[attr-defined]
        optimizer = worker.optimizer
        wrong = (
            optimizer.optimizer.state[optimizer.masters[0]]["exp_avg_sq"] if name == "moments" else optimizer.masters[0]
        )
        wrong.detach().view(-1)[0] = float("inf")
        run.step = 2
        with pytest.raises(UserError, match=r"infinity or NaN.* not saved;.*last checkpoint"):
            run._save(run._snapshot())
    latest = latest_checkpoint(run.folder)
    assert latest is not None and latest.name == "step-1"
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["latest", "step-1"]


# Which updates have an infinite gradient, and how many in a row may be left out.
SKIPPED: dict[str, tuple[Callable[[int], bool], int]] = {
    "all but the first": (lambda update: update >= 2, 1),
    "from the third on": (lambda update: update >= 3, 3),
    "every second, then all": (lambda update: update in (2, 4) or update >= 6, 2),
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", SKIPPED)
def test_consecutive_skipped_updates_end_the_run_and_keep_good_weights(
    workshop: Workshop, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite, most = SKIPPED[kind]
    last = next(n for n in range(1, 20) if all(map(infinite, range(n, n + most))))
    step, calls = MasterOptimizer.step, []

    def overflowing(self: MasterOptimizer, denominators: Any, iteration: int, overrides: Any) -> float | None:
        calls.append(iteration)
        return float("inf") if infinite(len(calls)) else step(self, denominators, iteration)

    monkeypatch.setattr(MasterOptimizer, "step", overflowing)
    trainer = {
        "steps": 12,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "skip_bad_updates": True,
        "max_skipped_updates": most,
    }
    with pytest.raises(UserError, match=f"trainer.max_skipped_updates={most} were left out"):
        workshop.run(trainer=trainer)
    assert len(calls) == last - 1 + most
    assert [folder.name for folder in checkpoints_of(workshop.folder / "run")] == [
        f"step-{n}" for n in range(last - 1, last - 1 + most)
    ]


def test_a_huge_learning_rate_is_noticed_by_the_step_that_uses_it(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = MasterOptimizer(
        {"weight": parameter}, TrainerConfig(learning_rate=1.0, optimizer="sgd", max_grad_norm=None), 3e38
    )
    optimizer.collect("rows")
    (parameter * 9.0).sum().backward()
    with pytest.raises(UserError, match="weights are infinite or NaN"):
        optimizer.step({"rows": 1.0}, 1)

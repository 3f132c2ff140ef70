"""The invariants hold with the performance options switched on: compiled kernels, which are the default, and shared
prompts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from braidrl.runtimes.run import TrainingRun
from braidrl.training.compute.packed import SharedPrompts
from tests.invariants.test_resume_is_exact import STEPS, assert_goes_on_as
from tests.invariants.traces import run
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop, metrics_without_times, recorded

# Prompts of four to six tokens and responses of at most three: a group of four shares more than half of its tokens.
FLOW: dict[str, Any] = {"flow": "grpo", "algorithm": {"old": "recompute"}, "rollout": {"max_response_tokens": 3}}
FAST = {"share_prompts": True, "compile": True}


@pytest.mark.soak
def test_a_run_with_shared_prompts_is_the_run_without(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"prompts_per_step": 4, "rows_per_update": 8, "max_tokens_per_device": 64, "learning_rate": 3e-3}
    apart = run(workshop, "apart", **FLOW, trainer=trainer)
    used, attend = [], SharedPrompts.attend
    monkeypatch.setattr(SharedPrompts, "attend", lambda self, *rest: (used.append(self), attend(self, *rest))[1])
    shared = run(workshop, "shared", **FLOW, trainer={**trainer, "share_prompts": True})
    assert used, "no prompt was shared"
    for ours, theirs in zip(shared, apart, strict=True):
        assert (ours.uids, ours.tokens) == (theirs.uids, theirs.tokens)
        # transformers' norms always compute in float32, so the rounding differs.
        assert ours.metrics["actor/grad_norm"] == pytest.approx(theirs.metrics["actor/grad_norm"], rel=1e-6)
        for name, tensor in ours.weights.items():
            torch.testing.assert_close(tensor, theirs.weights[name], rtol=0, atol=1e-5)


def test_all_switches_together_train_generated_tokens_and_resume_exactly(workshop: Workshop) -> None:
    trainer = {"prompts_per_step": 4, "checkpoint_every": 5, "learning_rate": 3e-3, **FAST}
    whole = workshop.run("whole", **FLOW, trainer={**trainer, "steps": STEPS})
    for step in (1, STEPS):
        rows = recorded(whole, step)
        gap = rows["rollout_log_probs"].values - rows["old_log_probs"].values
        assert float(gap.abs().max()) < 1e-5
    stopped = workshop.run("stopped", **FLOW, trainer={**trainer, "steps": 5})
    config = workshop.config("stopped", **FLOW, trainer={**trainer, "steps": STEPS})
    with TrainingRun(config, resume=stopped) as resumed:
        resumed.train()
    assert_goes_on_as(stopped, whole)


@pytest.mark.soak
def test_ranks_that_shard_a_float32_model_train_like_one_process(workshop: Workshop) -> None:
    """Train with sharded weights, which are not plain tensors: our kernels must leave them to torch."""
    trainer = {"prompts_per_step": 4, "steps": 2, **FAST}
    alone = metrics_without_times(workshop.run("alone", **FLOW, trainer=trainer))
    layouts: list[dict[str, Any]] = [{"tensor": 2}, {"shard": "full"}]
    trees = [
        workshop.tree(f"run-{i}", **FLOW, trainer={**trainer, "layout": layout}, runtime="distributed", workers=2)
        for i, layout in enumerate(layouts)
    ]
    run_in_ranks(trees, 2)
    for number in range(len(layouts)):
        for ours, theirs in zip(metrics_without_times(workshop.folder / f"run-{number}"), alone, strict=True):
            assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)

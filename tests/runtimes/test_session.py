"""A session's plain loop does what the runtime's own walk of the same stages does, in one process and under hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.flow import advantage, loss, select
from braidrl.runtimes.session import Session
from tests.invariants.traces import assert_same_weights
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import ROOT, Workshop, load_module, weights_of

STEPS = 3


def settings(runtime: str = "eager") -> dict[str, Any]:
    return {
        "flow": "grpo", "runtime": runtime, "dtype": "float64", "placement": "standalone",
        "trainer": {"steps": STEPS, "prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    }  # fmt: skip


def grpo_by_hand(config: Config, folder: Path) -> list[dict[str, float]]:
    metrics = []
    with Session(config) as session:
        for _ in range(STEPS):
            rows = session.prompts()
            rows = session.actor.generate(rows)
            rows = session.reward.verify(rows)
            rows = session.reference.log_probs(rows)
            rows = session.actor.log_probs(rows)
            rows = session.run(advantage.group_normalized(), rows)
            session.actor.update(
                rows,
                loss=loss.clip(low=0.2, high=0.2),
                kl={"name": "k3", "coef": 0.04},
                aggregate="seq-mean-token-mean",
            )
            metrics.append(session.metrics())
        session.save(folder)
    return metrics


@pytest.mark.parametrize("runtime", ["eager", "hybrid"])
def test_a_loop_by_hand_trains_as_the_recipe_does(workshop: Workshop, warm_cluster: WarmCluster, runtime: str) -> None:
    recipe = workshop.run("recipe", **settings())
    metrics = grpo_by_hand(workshop.config("by-hand", **settings(runtime)), workshop.folder / "saved")
    assert_same_weights(load_file(workshop.folder / "saved" / "actor" / "model.safetensors"), weights_of(recipe))
    assert len(metrics) == STEPS and all(found["actor/grad_norm"] > 0 for found in metrics)


def test_select_leaves_out_the_groups_that_it_drops(workshop: Workshop) -> None:
    with Session(workshop.config(**settings())) as session:
        rows = session.reward.verify(session.actor.generate(session.prompts(8)))
        kept = session.index(session.run(select.informative_groups(), rows))
        everything = session.index(rows)
    _, place = everything["group"].unique(return_inverse=True)
    right = torch.zeros(int(place.max()) + 1).index_add(0, place, everything["correct"])
    informative = set(everything["group"].unique()[(right > 0) & (right < 4)].tolist())
    assert 0 < len(informative) < 8 and set(kept["group"].tolist()) == informative


def test_roles_that_are_not_there_or_not_trained_are_refused(workshop: Workshop) -> None:
    with Session(workshop.config(**settings())) as session:
        with pytest.raises(AttributeError, match="no role is called 'critic' among actor, reference, reward"):
            _ = session.critic
        rows = session.actor.generate(session.prompts())
        with pytest.raises(UserError, match="reference has no optimizer: the flow grpo does not train it"):
            session.reference.update(rows, loss=loss.clip())


def test_runtimes_without_a_driver_are_refused(workshop: Workshop) -> None:
    with pytest.raises(UserError, match="a session has one driver, and runtime=distributed none"):
        Session(workshop.config(**settings("distributed")))


@pytest.mark.parametrize("runtime", ["eager", "hybrid"])
def test_the_example_runs(
    workshop: Workshop, warm_cluster: WarmCluster, runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_module(ROOT / "examples" / "session_ppo.py")
    example.main([
        f"runtime={runtime}", f"model={workshop.model}", f"data.train={workshop.data}", "device=cpu", "threads=1",
        f"reward.verify={workshop.folder}/verifiers.py:starts_even", "rollout.max_response_tokens=8", "trainer.steps=2",
        "trainer.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.slots=16", "placement=split",
    ])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2"]

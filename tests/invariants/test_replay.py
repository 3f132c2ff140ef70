"""Training needs only recorded rollouts: a replay gives the weights of the recorded run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from tests.tiny import Workshop, metrics_without_times, recorded, weights_of

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"flow": "grpo", "trainer": {"steps": STEPS, "rows_per_update": 8}},
    "dapo": {"flow": "dapo", "algorithm": {"overlong_cache": 2}, "trainer": {"steps": STEPS}},
}
# Metrics that exist only with generation.
OF_SAMPLING = ("groups/", "rows/generated", "tokens/generated", "score/", "response/", "reward/failures")


def of_training(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(OF_SAMPLING)}


@pytest.mark.parametrize("kind", RUNS)
def test_replaying_recorded_rollouts_gives_the_same_weights_and_metrics_of_training(
    workshop: Workshop, kind: str
) -> None:
    made = workshop.run("made", **RUNS[kind])
    again = workshop.run("again", replay=made, **RUNS[kind])
    first, second = weights_of(made), weights_of(again)
    untrained = load_file(workshop.model / "model.safetensors")
    assert any(not torch.equal(first[name], untrained[name]) for name in first), "the run must have learned something"
    assert all(torch.equal(first[name], second[name]) for name in first)
    for mine, theirs in zip(metrics_without_times(again), metrics_without_times(made), strict=True):
        assert of_training(mine) == of_training(theirs)


def test_rollout_only_records_same_rows_without_training(workshop: Workshop) -> None:
    only = workshop.run("only", rollout_only=True, **RUNS["grpo"])
    lines = read_metrics(only)
    assert [(line["step"], line["version"]) for line in lines] == [(1, 0), (2, 0), (3, 0)]
    assert all(line["actor/grad_norm"] is None and line["score/mean"] is not None for line in lines)
    untrained = load_file(workshop.model / "model.safetensors")
    assert all(torch.equal(tensor, untrained[name]) for name, tensor in weights_of(only).items())
    trained = workshop.run("trained", **RUNS["grpo"])
    assert torch.equal(recorded(only, 1)["tokens"].values, recorded(trained, 1)["tokens"].values)
    assert not torch.equal(recorded(only, 3)["tokens"].values, recorded(trained, 3)["tokens"].values)


def test_rollouts_of_a_run_that_trained_nothing_can_be_trained_on(workshop: Workshop) -> None:
    one_step = {"flow": "grpo", "trainer": {"steps": 1}}
    only = workshop.run("only", rollout_only=True, **one_step)
    replayed, trained = workshop.run("replayed", replay=only, **one_step), workshop.run("trained", **one_step)
    mine, theirs = weights_of(replayed), weights_of(trained)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_incomplete_recording_is_refused_before_start(workshop: Workshop) -> None:
    made = workshop.run("made", trainer={"steps": 1})
    with pytest.raises(UserError, match=r"made .*step 2; write trainer.steps=1"):
        workshop.run("again", replay=made)
    with pytest.raises(UserError, match="choose one"):
        workshop.run("again", replay=made, rollout_only=True, trainer={"steps": 1})
    assert not (workshop.folder / "again").exists()

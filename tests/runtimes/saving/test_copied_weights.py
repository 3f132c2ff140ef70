"""An update without a loss copies another role's weights within one process and into every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.invariants.traces import assert_same, trace
from tests.tiny import Workshop

FOLLOWING: dict[str, Any] = {
    "flow": str(Path(__file__).parents[1] / "following.yaml"),
    "dtype": "float64",
    "trainer": {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 3, "learning_rate": 3e-3},
}


def test_ema_role_moves_by_decay_and_resumes(workshop: Workshop) -> None:
    steps = trace(workshop.run("whole", **FOLLOWING))
    before = {
        f"reference.{name}": tensor.double() for name, tensor in load_file(workshop.model / "model.safetensors").items()
    }
    for step in steps:
        for name, tensor in before.items():
            actor = step.weights[name.replace("reference.", "actor.")]
            assert (step.weights[name] - (tensor + actor) / 2).abs().max() < 1e-12
            assert (actor - tensor).abs().max() > 0
        before = {name: step.weights[name] for name in before}
    first = workshop.run("first", **{**FOLLOWING, "trainer": {**FOLLOWING["trainer"], "steps": 1}})
    config = run_config(first)
    with TrainingRun(
        config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 2})}), resume=first
    ) as run:
        run.train()
    assert_same(trace(first), steps)


@pytest.mark.soak
def test_in_a_stream_the_weights_travel_to_the_role_that_follows(workshop: Workshop) -> None:
    streamed = workshop.run("streamed", runtime="streaming", streaming={"workers": {"reference": 2}}, **FOLLOWING)
    assert_same(trace(streamed), trace(workshop.run("eager", **FOLLOWING)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"runtime": "hybrid", "placement": "standalone"}, r"reference and actor .*one pool"),
        ({"runtime": "streaming", "flow": "UNMODELLED"}, r"no process .*weights of rival"),
    ],
)
def test_impossible_weight_transfer_is_refused_before_anything_starts(
    workshop: Workshop, sections: dict[str, Any], message: str
) -> None:
    # A flow in which one role only generates, and takes the weights of another role.
    unmodelled = workshop.folder / "unmodelled.yaml"
    text = Path(FOLLOWING["flow"]).read_text().replace("source: actor", "source: rival")
    rival = "  - {type: generate, role: rival, params: {into: rivals}}"
    unmodelled.write_text(text.replace("  - {type: verify", f"{rival}\n  - {{type: verify"))
    if "flow" in sections:
        sections = {**sections, "flow": str(unmodelled)}
    with pytest.raises(UserError, match=message):
        train(parse_config(workshop.tree("refused", **{**FOLLOWING, **sections})))
    assert not (workshop.folder / "refused").exists()

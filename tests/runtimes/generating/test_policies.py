"""Opponents that no loss trains: earlier states of a role with their rating, and models of a folder; both also as
adapters on the base of the role that is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from braidrl.engines.deployment_checks import check_deployment
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.run import TrainingRun
from braidrl.training.lora import ADAPTER
from braidrl.weights.file import ADAPTER as ADAPTER_WEIGHTS
from tests.invariants.traces import EVERY_STEP, assert_same, merged, run, trace
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import ROOT, Workshop, metrics_without_times, recorded, weights_of

LEAGUE: dict[str, Any] = {
    "flow": str(ROOT / "tests" / "runtimes" / "league.yaml"),
    "rollout": {"max_response_tokens": 3, "environment": {"params": {"opponents": ["older", "rival"]}}},
}
TRAINER = {"steps": 4, "prompts_per_step": 4, "checkpoint_every": 2, "learning_rate": 1e-2}


def test_an_earlier_state_plays_is_rated_and_goes_on_after_a_resume(workshop: Workshop) -> None:
    whole = workshop.run("whole", **LEAGUE, trainer=TRAINER)
    lines = metrics_without_times(whole)
    ratings = [line["shape.elo.older/rating"] for line in lines]
    assert ratings[0] == 0 and len(set(ratings)) > 2
    rows = recorded(whole, 3)
    acted = {role: (rows[f"{role}.action_tokens"] > 0).tolist() for role in ("older", "rival")}
    assert any(acted["older"]) and any(acted["rival"])
    assert not any(a and b for a, b in zip(*acted.values(), strict=True)), "one of them plays in a row"
    actor, older = (weights_of(whole, role) for role in ("actor", "older"))
    assert all(torch.equal(older[name], actor[name]) for name in actor), "step 4 has copied the actor"
    stopped = workshop.run("stopped", **LEAGUE, trainer={**TRAINER, "steps": 2})
    with TrainingRun(workshop.config("stopped", **LEAGUE, trainer=TRAINER), resume=stopped) as resumed:
        resumed.train()
    assert metrics_without_times(stopped) == lines


WITH_LORA = {"trainer": {**TRAINER, "checkpoint_every": 1, "keep_checkpoints": 4, "lora": {"rank": 2}}}
ADAPTERS: dict[str, Any] = {
    **WITH_LORA,
    "rollout": {**LEAGUE["rollout"], "shared_base": True},
}


def test_opponents_on_one_base_play_as_models_of_their_own(workshop: Workshop) -> None:
    league = merged(LEAGUE, WITH_LORA)
    together = run(workshop, "together", **merged(league, ADAPTERS))
    apart = run(workshop, "apart", **league)
    assert_same(together, apart)
    copied = load_file(workshop.folder / "together" / "checkpoints" / "step-4" / "older" / ADAPTER / ADAPTER_WEIGHTS)
    moved = [line.get("weights/older/copied") for line in read_metrics(workshop.folder / "together")]
    # The last copy is made after the last stage of step 4.
    assert {size for size in moved if size} == {sum(tensor.nbytes for tensor in copied.values())}


@pytest.mark.soak
def test_a_league_on_one_base_is_the_same_under_each_runtime(workshop: Workshop) -> None:
    sections = merged(LEAGUE, ADAPTERS)
    alone = run(workshop, "alone", **sections)
    streamed = run(workshop, "streamed", **sections, runtime="streaming")
    known = alone[0].metrics.keys()
    assert_same([replace(step, metrics={k: step.metrics[k] for k in known}) for step in streamed], alone)
    run_in_ranks([workshop.tree("ranks", **merged(EVERY_STEP, sections), runtime="distributed", workers=2)], 2)
    assert_same(trace(workshop.folder / "ranks"), alone)


def test_a_stored_adapter_plays_as_its_merged_model_does(workshop: Workshop) -> None:
    first = workshop.run("first", **merged(LEAGUE, ADAPTERS))
    stored = first / "checkpoints" / "step-2" / "actor"
    sections = merged(LEAGUE, ADAPTERS) | {"roles": {"rival": {"lora": {"adapter": str(stored / ADAPTER)}}}}
    adapter = recorded(workshop.run("adapter", **sections), 1)
    league = merged(LEAGUE, WITH_LORA) | {"roles": {"rival": {"model": str(stored)}}}
    model = recorded(workshop.run("model", **league), 1)
    assert torch.equal(adapter["rival.tokens"].values, model["rival.tokens"].values)
    drawn = [rows["rival.rollout_log_probs"].values for rows in (adapter, model)]
    torch.testing.assert_close(*drawn)
    untrained = recorded(first, 1)["rival.rollout_log_probs"].values
    assert drawn[0].shape != untrained.shape or not torch.allclose(drawn[0], untrained)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": {"older": {"lora": {"rank": 4}}}}, "those of older and actor differ"),
        ({"flow": "decayed"}, "remove `decay`"),
    ],
)
def test_copies_of_adapters_that_cannot_be_made_are_refused(
    workshop: Workshop, changes: dict[str, Any], message: str
) -> None:
    sections = merged(merged(LEAGUE, ADAPTERS), changes)
    if sections["flow"] == "decayed":
        sections["flow"] = str(workshop.folder / "decayed.yaml")
        text = (
            (ROOT / "tests" / "runtimes" / "league.yaml")
            .read_text()
            .replace("source: actor", "source: actor, decay: 0.5")
        )
        (workshop.folder / "decayed.yaml").write_text(text)
    config = workshop.config("refused", **sections)
    flow = build_flow(config)
    with pytest.raises(UserError, match=message):
        check_deployment(deploy(config, flow), flow)

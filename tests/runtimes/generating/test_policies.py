"""Opponents that no loss trains: earlier states of a role with their rating, and models of a folder."""

from __future__ import annotations

from typing import Any

import torch

from braidrl.runtimes.run import TrainingRun
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

"""Defaults of a flow's updates: the source of old log-probs, and the loss's correction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.flow import Flow, actor
from braidrl.flow.recipes import RECIPES, load_flow
from braidrl.flow.yaml_form import to_yaml
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from tests.tiny import settings

STALE = {"trainer": {"max_staleness": 1}}


@pytest.mark.parametrize(
    ("sections", "old", "corrected"),
    [
        ({}, "self", False),
        ({"trainer": {"rows_per_update": 8}}, "recompute", False),
        ({"rollout": {"dtype": "bfloat16"}}, "self", True),
        ({"rollout": {"engine": "vllm"}}, "self", True),
        (STALE, "recompute", True),
        ({**STALE, "algorithm": {"old": "rollout"}}, "rollout", False),
        ({**STALE, "algorithm": {"correction": {"name": "masked"}}}, "recompute", True),
    ],
)
def test_tokens_that_others_drew_are_corrected_for(sections: dict[str, Any], old: str, corrected: bool) -> None:
    flow = build_flow(parse_config(settings("runs", "model", "data.jsonl", flow="dapo", **sections)))  # type: ignore[arg-type]
    update = flow["actor.update"]
    assert update.params["old"] == old
    name = sections.get("algorithm", {}).get("correction", {"name": "truncated"})["name"]
    assert update.params.get("correction") == ({"name": name} if corrected else None)
    assert ("actor.log_probs" in [stage.name for stage in flow.stages]) == (old == "recompute")


def test_sampling_temperature_equals_log_prob_temperature(tmp_path: Path) -> None:
    path = tmp_path / "warm.yaml"
    path.write_text(to_yaml(Flow("warm", [actor.generate(temperature=0.7), *load_flow("grpo", {}, {}).stages[1:]])))
    tree = settings(tmp_path / "runs", tmp_path / "model", tmp_path / "data.jsonl", flow=str(path))
    with pytest.raises(
        UserError, match=r"temperature=0.7 draws .* rollout.temperature=1; write rollout.temperature=0.7"
    ):
        build_flow(parse_config(tree))
    tree["rollout"] = {**tree.get("rollout", {}), "temperature": 0.7}
    assert build_flow(parse_config(tree))["actor.generate"].params["temperature"] == 0.7


@pytest.mark.parametrize("name", list(RECIPES))
def test_evaluation_uses_a_trained_role(name: str) -> None:
    """DPO's first stage infers with the reference, which does not change."""
    scorers = {"reward": {"model": "reward"}, "cost": {"model": "cost"}}
    tree = settings("runs", "model", "data.jsonl", flow=name, roles=scorers)  # type: ignore[arg-type]
    tree["rollout"]["samples_per_prompt"] = {"sft": 1, "dpo": 2, "reward_model": 2}.get(name, 4)
    config = parse_config(tree)
    flow = build_flow(config)
    evaluated = {stage.role for stage in evaluation_flow(config, flow).stages if stage.type in ("generate", "score")}
    assert evaluated and evaluated <= set(flow.trained_roles)

"""What a configuration fills in of a flow's updates: where old log-probs come from, and when the loss is corrected."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.runtimes.prepare.flow import build_flow
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

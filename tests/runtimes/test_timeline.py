"""Every runtime writes a timeline of its devices: here eager, through the command."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from braidrl.cli.commands import app
from braidrl.observe.trace import read_trace
from tests.tiny import Workshop


def test_an_eager_run_leaves_a_trace_that_the_timeline_draws(workshop: Workshop) -> None:
    run = workshop.run(flow="grpo", algorithm={"kl_coef": 0.0}, trainer={"steps": 2})
    spans = read_trace(run)
    by_stage = {(span.stage, span.iteration): span for span in spans}
    assert {stage for stage, _ in by_stage} >= {"actor.generate", "reward.verify", "actor.update"}
    generated, trained = by_stage["actor.generate", 2], by_stage["actor.update", 2]
    assert generated.rows == trained.rows > 0
    assert generated.version == 1
    assert trained.tokens > 0
    shown = CliRunner().invoke(app, ["timeline", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "actor.generate" in shown.output
    assert any(
        event.get("name") == "actor.update" for event in json.loads((run / "timeline.json").read_text())["traceEvents"]
    )

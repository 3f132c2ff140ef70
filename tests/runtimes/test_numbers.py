"""Invalid numbers are refused: an infinite reward, a NaN loss, an implausible learning rate."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from tests.tiny import Workshop, recorded, weights_of

FLOW = str(Path(__file__).parent / "numbers.yaml")
RUNTIMES: dict[str, dict[str, Any]] = {
    "eager": {},
    "distributed": {"workers": 2},
    "streaming": {},
}


@pytest.fixture(params=[*RUNTIMES, "hybrid"])
def runtime(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "hybrid":
        request.getfixturevalue("warm_cluster")
    return {"runtime": request.param, **RUNTIMES.get(request.param, {"workers": 2})}


@pytest.mark.soak
@pytest.mark.parametrize(
    "runtime", ["eager", pytest.param("distributed", marks=pytest.mark.soak), "streaming", "hybrid"], indirect=True
)
def test_nan_update_names_token_and_replay_reproduces_it(workshop: Workshop, runtime: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        train(workshop.config("nan", flow=FLOW, trainer={"steps": 3}, **runtime))
    said = str(caught.value)
    assert re.match(r"step 2: actor.update: .*norm is nan", said) and "\n" not in said
    # Under hybrid another worker's message may come first; it names only the rows of the update.
    assert runtime["runtime"] == "hybrid" or re.search(r"advantages is nan .*\(0, 5, 1\)", said), said
    run = workshop.folder / "nan"
    assert [line["step"] for line in read_metrics(run)] == [1]
    rows = recorded(run, 2)
    assert [uid for uid in rows.uids() if uid[1:] == (5, 1)] and len(rows) == 16
    assert f"braid train {run}/config.yaml name=nan-replay trainer.steps=2 --replay {run}" in said
    with pytest.raises(UserError, match=r"step 2: .*norm.*nan.*advantages.*\(0, 5, 1\)"):
        train(workshop.config("nan-replay", flow=FLOW, trainer={"steps": 2}), replay=run)


def test_nan_update_is_skipped_and_counted_if_configured(workshop: Workshop, runtime: dict[str, Any]) -> None:
    trainer = {"steps": 3, "skip_bad_updates": True}
    run = train(workshop.config("skips", flow=FLOW, trainer=trainer, **runtime))
    lines = read_metrics(run)
    assert [line.get("actor/skipped_updates") for line in lines] == [None, 1, None]
    assert lines[1]["actor/grad_norm"] is None and lines[2]["actor/grad_norm"] > 0
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(run).values())


@pytest.mark.parametrize("score", ["1e39", "-2e6", "float('inf')"])
def test_a_score_beyond_the_limit_is_its_rows_counted_failure(workshop: Workshop, score: str) -> None:
    (workshop.folder / "far.py").write_text(f"def far(response: str) -> float:\n    return {score}\n")
    run = workshop.run("far", reward={"verify": f"{workshop.folder}/far.py:far", "max_failed_fraction": 1.0})
    lines = read_metrics(run)
    assert [line["reward/failures/far/result"] for line in lines] == [16, 16]
    assert all(math.isfinite(line["reward/mean"]) and abs(line["reward/mean"]) <= 1 for line in lines)


def test_implausible_learning_rate_is_reported(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = {"steps": 1, "learning_rate": 100.0}
    workshop.run("fast", trainer=trainer)
    output = capsys.readouterr()
    assert "learning rate of actor is 100" in output.out + output.err
    workshop.run("usual", trainer={"steps": 1})
    output = capsys.readouterr()
    assert "learning rate" not in output.out + output.err

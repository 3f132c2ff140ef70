"""Invariant 7: kill at any step and resume: metrics and weights continue as in an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, run_config
from tests.cases import soak_but
from tests.tiny import Workshop, braid, metrics_without_times, recorded, wait_for_steps, weights_of

STEPS = 9
DAPO = {"flow": "dapo", "algorithm": {"overlong_cache": 2}, "rollout": {"samples_per_prompt": 2}}
TRAINER = {"steps": STEPS, "prompts_per_step": 4, "checkpoint_every": 5, "deterministic": True, "learning_rate": 3e-3}
RUNS: dict[str, dict[str, Any]] = {
    "several updates": {"flow": "grpo", "trainer": {**TRAINER, "rows_per_update": 8, "epochs": 2}},
    "refills": {**DAPO, "trainer": TRAINER, "data": {"curriculum": "progress"}},
    "surplus": {
        **DAPO,
        "trainer": {**TRAINER, "surplus": "keep", "max_staleness": 1, "schedule": "cosine", "warmup_steps": 3},
    },
}


@pytest.fixture(autouse=True)
def deterministic_for_this_test() -> Iterator[None]:
    """Reset torch: a deterministic run in this process switches it for good."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def evaluated(workshop: Workshop) -> Workshop:
    """Run with a held-out set, so that there are evaluations on both sides of the interruption."""
    lines = workshop.data.read_text().splitlines(keepends=True)[:4]
    (workshop.folder / "held_out.jsonl").write_text("".join(lines))
    return workshop


def sections(workshop: Workshop, kind: str) -> dict[str, Any]:
    data = {"eval": {"held_out": str(workshop.folder / "held_out.jsonl")}, **RUNS[kind].get("data", {})}
    return {**RUNS[kind], "data": data, "evaluation": {"every": 4, "samples": 2}}


def assert_goes_on_as(resumed: Path, whole: Path) -> None:
    assert metrics_without_times(resumed) == metrics_without_times(whole)
    first, second = weights_of(resumed), weights_of(whole)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert recorded(resumed, STEPS).uids() == recorded(whole, STEPS).uids()


@pytest.mark.parametrize("kind", soak_but(["refills"], RUNS))
def test_killed_during_step_7_and_resumed(evaluated: Workshop, kind: str) -> None:
    config = evaluated.config_file("killed", **sections(evaluated, kind))
    killed = evaluated.folder / "killed"
    process = braid("train", config)
    # One line before the first step, then one for each.
    wait_for_steps(killed, 7, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    # On a busy machine the run may get a step further before the test sees it; the checkpoint after step 5 is that of
    # step 10.
    assert 6 <= max(line["step"] for line in read_metrics(killed)) < 10
    checkpoint = latest_checkpoint(killed)
    assert checkpoint is not None and checkpoint.name == "step-5"
    if kind == "refills":
        again = braid("train", "--resume", killed)
        _, output = again.communicate(timeout=180)
        assert again.returncode == 0 and output.startswith(f"{killed}\n"), output
    else:
        with TrainingRun(run_config(killed), resume=killed) as run:
            run.train()
    whole = evaluated.run("whole", **sections(evaluated, kind))
    lines = metrics_without_times(whole)
    if kind != "several updates":
        assert any(line.get("groups/dropped/all_wrong") or line.get("groups/dropped/all_correct") for line in lines)
    if kind == "surplus":
        assert max(line["staleness/max"] or 0 for line in lines) == 1
    assert_goes_on_as(killed, whole)


@pytest.mark.soak
def test_killed_before_the_first_checkpoint_begins_anew(evaluated: Workshop) -> None:
    kind = sections(evaluated, "refills")
    config = evaluated.config_file("killed", **kind)
    process = braid("train", config)
    wait_for_steps(evaluated.folder / "killed", 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with TrainingRun(run_config(evaluated.folder / "killed"), resume=evaluated.folder / "killed") as run:
        run.train()
    assert_goes_on_as(evaluated.folder / "killed", evaluated.run("whole", **kind))


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_ctrl_c_saves_exits_130_and_run_can_resume(evaluated: Workshop, steps: int) -> None:
    kind = sections(evaluated, "surplus")
    process = braid("train", evaluated.config_file("stopped", **kind))
    stopped = evaluated.folder / "stopped"
    wait_for_steps(stopped, steps + 1, process)
    time.sleep(0.05)
    # Like a terminal, send the signal to the whole process group, including the reward processes.
    os.killpg(process.pid, signal.SIGINT)
    _, output = process.communicate(timeout=180)
    assert process.returncode == 130, output
    done = read_metrics(stopped)[-1]["step"]
    assert output.splitlines()[-1] == f"saved step {done}; go on with: braid train --resume {stopped}"
    assert "Traceback" not in output
    with TrainingRun(run_config(stopped), resume=stopped) as run:
        assert run.step == done
        run.train()
    assert_goes_on_as(stopped, evaluated.run("whole", **kind))


def test_surplus_that_no_batch_could_train_on_is_refused(workshop: Workshop) -> None:
    with pytest.raises(UserError, match=r"write trainer\.max_staleness=1 or trainer\.surplus=drop"):
        workshop.run(flow="dapo", trainer={"surplus": "keep"})


@pytest.mark.parametrize(("verifier", "last_step"), [("always_right", 2), ("always_wrong", 4)])
def test_run_stops_at_target_accuracy_and_stays_stopped(evaluated: Workshop, verifier: str, last_step: int) -> None:
    evaluation = {"every": 2, "samples": 2, "stop_at": 0.9, "before_first_step": False}
    data = {"eval": {"held_out": str(evaluated.folder / "held_out.jsonl")}}
    reward = {"verify": f"{evaluated.folder}/verifiers.py:{verifier}"}
    trainer = {**TRAINER, "steps": 4, "deterministic": False}
    run = evaluated.run(flow="grpo", data=data, evaluation=evaluation, reward=reward, trainer=trainer)
    assert read_metrics(run)[-1]["step"] == last_step
    with TrainingRun(run_config(run), resume=run) as resumed:
        resumed.train()
    assert [line["step"] for line in read_metrics(run)] == list(range(1, last_step + 1))

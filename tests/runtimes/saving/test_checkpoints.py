"""Checkpoints are written while the run continues, completely or not at all; the run waits for them and reports their
errors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import braidrl.training.roles.checkpoint as checkpoint
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, partial_path, run_config
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop, braid, metrics_without_times, wait_for_steps, weights_of

LIMIT_S = 180.0
SETTINGS: dict[str, Any] = {
    "flow": "grpo",
    "rollout": {"max_response_tokens": 3},
    "trainer": {
        "steps": 4,
        "prompts_per_step": 2,
        "checkpoint_every": 2,
        "checkpoint_async": True,
        "keep_checkpoints": 4,
    },
}


def with_trainer(**trainer: Any) -> dict[str, Any]:
    return {**SETTINGS, "trainer": {**SETTINGS["trainer"], **trainer}}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer of a checkpoint."""
    folder = run / "checkpoints" / f"step-{step}" / "actor"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def test_checkpoint_written_during_later_steps_holds_its_own_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = workshop.run("at-once", **with_trainer(checkpoint_async=False))
    write, beside, threads = checkpoint.write_files, workshop.folder / "beside", []

    def slow(parts: Any, ranks: Any, folder: Path, stem: str, is_first: bool) -> Any:
        """Write only after a later step has ended, so that a run that waited for the write would hang."""
        step = int(folder.parent.name.split("-")[1].split(".")[0])
        threads.append(threading.current_thread() is threading.main_thread())
        if step == 2:
            wait_until(lambda: read_metrics(beside)[-1]["step"] >= 3)
            assert latest_checkpoint(beside) is None and partial_path(beside / "checkpoints" / "step-2").is_dir()
        return write(parts, ranks, folder, stem, is_first)

    monkeypatch.setattr(checkpoint, "write_files", slow)
    workshop.run("beside", **SETTINGS)
    assert threads == [False] * 4, "weights and optimizer of two checkpoints"
    assert metrics_without_times(beside) == metrics_without_times(at_once)
    for step in (2, 4):
        ours, theirs = saved(beside, step), saved(at_once, step)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sorted(p.name for p in (beside / "checkpoints").iterdir()) == ["latest", "step-2", "step-4"]


def test_background_write_error_ends_run_at_next_step(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write_files

    def full(parts: Any, ranks: Any, folder: Path, stem: str, is_first: bool) -> Any:
        if "step-2" in str(folder):
            raise OSError(28, "No space left on device")
        return write(parts, ranks, folder, stem, is_first)

    monkeypatch.setattr(checkpoint, "write_files", full)
    with (
        pytest.raises(UserError, match=r"checkpoint of step 2.*No space") as caught,
        TrainingRun(workshop.config(**with_trainer(steps=50, checkpoint_every=1))) as run,
    ):
        run.train()
    assert "\n" not in str(caught.value)
    assert 2 <= run.step <= 3
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["latest", "step-1"]
    assert latest_checkpoint(run.folder) == run.folder / "checkpoints" / "step-1"


def test_ctrl_c_waits_for_the_checkpoint_being_written(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    write, interrupted = checkpoint.write_files, threading.Event()

    def slow(parts: Any, ranks: Any, folder: Path, stem: str, is_first: bool) -> Any:
        interrupted.wait(LIMIT_S)
        time.sleep(0.3)
        return write(parts, ranks, folder, stem, is_first)

    monkeypatch.setattr(checkpoint, "write_files", slow)
    with TrainingRun(workshop.config(**SETTINGS)) as run:
        step = run._one_step

        def third_is_interrupted(state: Any) -> None:
            if run.step == 2:
                interrupted.set()
                raise KeyboardInterrupt
            step(state)

        monkeypatch.setattr(run, "_one_step", third_is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert latest_checkpoint(run.folder) == run.folder / "checkpoints" / "step-2"
    assert not partial_path(run.folder / "checkpoints" / "step-2").exists()


HANGING = """
import time, braidrl.training.roles.checkpoint as checkpoint
write = checkpoint.write_files
checkpoint.write_files = lambda *about: time.sleep(600) if "step-4" in str(about[2]) else write(*about)
"""


def test_kill_during_checkpoint_write_resumes_from_previous(workshop: Workshop) -> None:
    sections = with_trainer(steps=6, deterministic=False)
    config = workshop.config_file("killed", **sections)
    killed = workshop.folder / "killed"
    process = braid("train", config, prefix=HANGING)
    wait_until(lambda: (killed / "metrics.jsonl").is_file() and len(read_metrics(killed)) >= 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert partial_path(killed / "checkpoints" / "step-4").is_dir(), "the checkpoint was being written"
    assert latest_checkpoint(killed) == killed / "checkpoints" / "step-2"
    with TrainingRun(run_config(killed), resume=killed) as run:
        assert run.step == 2
        run.train()
    whole = workshop.run("whole", **sections)
    assert metrics_without_times(killed) == metrics_without_times(whole)
    assert all(torch.equal(t, weights_of(whole)[name]) for name, t in weights_of(killed).items())


@pytest.mark.soak
def test_ranks_write_their_parts_beside_the_next_steps_too(workshop: Workshop) -> None:
    trainer = {"layout": {"shard": "full"}, "checkpoint_every": 1}
    more = {"runtime": "distributed", "workers": 2}
    trees = [
        workshop.tree("beside", **with_trainer(**trainer), **more),
        workshop.tree("at-once", **with_trainer(**trainer, checkpoint_async=False), **more),
    ]
    run_in_ranks(trees, 2)
    beside, at_once = (workshop.folder / name for name in ("beside", "at-once"))
    assert metrics_without_times(beside) == metrics_without_times(at_once)
    assert not list((beside / "checkpoints").glob(".*"))
    for run in (beside, at_once):
        assert latest_checkpoint(run) == run / "checkpoints" / "step-4"
        # A single process resumes from it, with the optimizer shards of both ranks.
        further = workshop.config(run.name, **with_trainer(steps=5))
        with TrainingRun(further, resume=run) as resumed:
            resumed.train()
    assert metrics_without_times(beside) == metrics_without_times(at_once)
    ours, theirs = saved(beside, 5), saved(at_once, 5)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


PROCESSES = [pytest.param("hybrid", marks=pytest.mark.soak), "streaming"]
HELD = str(Path(__file__).parents[1] / "held_writing.yaml")


def in_processes(runtime: str, **trainer: Any) -> dict[str, Any]:
    return {**with_trainer(**trainer), "flow": HELD, "runtime": runtime, "dtype": "float64"}


@pytest.mark.soak
@pytest.mark.parametrize("runtime", PROCESSES)
def test_workers_killed_during_background_write_resume_from_previous(workshop: Workshop, runtime: str) -> None:
    sections = in_processes(runtime, checkpoint_every=1)
    config, killed = workshop.config_file(f"killed-{runtime}", **sections), workshop.folder / f"killed-{runtime}"
    held = workshop.folder / f"{killed.name}.step-2.held"
    held.touch()
    process = braid("train", config)
    try:
        wait_for_steps(killed, 3, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    partial = partial_path(killed / "checkpoints" / "step-2")
    assert partial.is_dir(), "the checkpoint was being written"
    assert latest_checkpoint(killed) == killed / "checkpoints" / "step-1"
    held.unlink()
    here = {"runtime": "eager"}
    with TrainingRun(run_config(killed).model_copy(update=here), resume=killed) as run:
        assert run.step == 1
        run.train()
    whole = workshop.run(f"whole-{runtime}", **{**sections, **here})
    assert not partial.exists()
    ours, theirs = saved(killed, 4), saved(whole, 4)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-7)


@pytest.mark.parametrize("runtime", PROCESSES)
def test_failed_worker_write_ends_run_in_one_line(workshop: Workshop, runtime: str) -> None:
    config = workshop.config(f"full-{runtime}", **in_processes(runtime, steps=50, checkpoint_every=1))
    (workshop.folder / f"full-{runtime}.full").touch()
    message = r"checkpoint of step 1.*No space"
    with TrainingRun(config) as run, pytest.raises(UserError, match=message) as caught:
        run.train()
    assert "\n" not in str(caught.value) and 1 <= run.step <= 3
    assert list((run.folder / "checkpoints").iterdir()) == []

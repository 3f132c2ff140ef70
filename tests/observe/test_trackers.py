"""Trackers get every finite number of every step; a failing tracker only costs a line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from braidrl.config import Config, TrackerConfig
from braidrl.config.config import default_trackers
from braidrl.errors import UserError
from braidrl.observe.metrics import MetricsWriter, read_metrics
from braidrl.observe.report import samples_of_step
from braidrl.observe.trackers import Samples, TrackedRun, Trackers, check_tracker
from braidrl.runtimes.prepare.names import check_names
from tests.observe.made_up import metrics_of
from tests.tiny import ROOT, Workshop


class FailingTracker:
    """Raises from its second step on."""

    def __init__(self, run: TrackedRun) -> None:
        self.steps = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        if self.steps > 1:
            raise ConnectionError("no answer\nfrom the server")

    def close(self) -> None:
        raise ConnectionError("no answer")


class ClosedTracker(FailingTracker):
    """Raises when it is opened."""

    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no such project")


class KeepingTracker:
    """Writes the samples and the report that it gets to a file."""

    def __init__(self, run: TrackedRun) -> None:
        self.file = run.folder / "kept.jsonl"

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def write_samples(self, step: int, samples: Samples) -> None:
        self.keep({"step": step, "samples": list(samples)})

    def write_report(self, report: Path) -> None:
        self.keep({"report": str(report)})

    def keep(self, what: dict[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def close(self) -> None:
        pass


def own(name: str, samples_every: int = 10) -> TrackerConfig:
    return TrackerConfig(name=f"{__file__}:{name}", samples_every=samples_every)


def trackers(folder: Path, *chosen: TrackerConfig, resume_step: int | None = None) -> tuple[Trackers, list[str]]:
    said: list[str] = []
    return Trackers(chosen, TrackedRun(folder, {}, resume_step), said.append), said


def test_tensorboard_keeps_its_contract_and_shows_configuration_and_samples(tmp_path: Path) -> None:
    check_tracker("tensorboard", tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()

    def texts(name: str) -> list[tuple[int, str]]:
        return [(each.step, each.tensor_proto.string_val[0].decode()) for each in board.Tensors(f"{name}/text_summary")]

    assert "flow: grpo\ntrainer:\n  steps: 4\n" in texts("configuration")[0][1]
    assert {step for step, _ in texts("samples")} == {0, 1, 2, 3}
    # Sorted by step, because files of the same second are read in the order of their names, whose numbers have no
    # leading zeros.
    heads, _, row = dict(texts("samples"))[1].splitlines()
    assert heads == "| step | set | prompt | response | answer | finish_reason | score | correct |"
    assert row == "| 1 | " + "∑ 😀 \\|<br> | " * 5 + " | True |"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_in_a_folder_that_vanished_costs_a_line(tmp_path: Path) -> None:
    opened, said = trackers(tmp_path / "run", TrackerConfig(name="tensorboard"))
    opened.write(1, {"reward/mean": 0.5})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        opened.write(step, {"reward/mean": 0.5})
    opened.write_samples(10, lambda: [{"step": 10}])
    opened.close()
    assert len(said) == 1 and re.match(r"tracker tensorboard: FileNotFoundError: .*/run/tensorboard", said[0])


def test_run_passes_due_samples_and_report_to_trackers(workshop: Workshop) -> None:
    chosen = [{"name": f"{__file__}:KeepingTracker", "samples_every": 2}]
    run = workshop.run("kept", trackers=chosen, trainer={"steps": 3})
    samples, report = map(json.loads, (run / "kept.jsonl").read_text().splitlines())
    assert samples == {"step": 2, "samples": samples_of_step(run, 2)} and report == {"report": str(run / "report.html")}
    scores = [sample["score"] for sample in samples["samples"]]
    assert {sample["set"] for sample in samples["samples"]} == {"training"} and scores == sorted(scores, reverse=True)
    assert all(sample["prompt"] and isinstance(sample["response"], str) for sample in samples["samples"])


@pytest.mark.parametrize(
    "names", [["trackio"], pytest.param(["trackio", "wandb", "swanlab", "mlflow"], marks=pytest.mark.soak)], ids=len
)
def test_tracker_output_can_be_read_back(names: list[str], tmp_path: Path) -> None:
    place = ROOT / "build" / "trackers-venv"
    if not (place / "installed").is_file():
        pytest.skip("the libraries are not installed; `make trackers` installs them")
    folder = tmp_path / "tracked"
    command = [str(place / "bin" / "python"), "-m", "tests.observe.library_trackers", str(folder), *names]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    expected = {
        "points": [[1, 0.5], [2, 1.0], [3, 1.5]],
        "flow": "grpo",
        "responses": ["vier | four"],
        "report": "a report",
    }
    assert json.loads((folder / "found.json").read_text()) == dict.fromkeys(names, expected)


def test_missing_library_names_install_command() -> None:
    with pytest.raises(UserError, match=r"trackers=swanlab .*pip install 'braidrl\[swanlab\]'"):
        check_names(Config(flow="grpo", model="m", trackers=[TrackerConfig(name="swanlab")]))


def test_tensorboard_shows_the_resumed_steps_once(tmp_path: Path) -> None:
    for resume_step, steps, reward in ((None, range(1, 5), 1.0), (2, [3], 9.0)):
        opened, said = trackers(tmp_path, TrackerConfig(name="tensorboard"), resume_step=resume_step)
        writer = MetricsWriter(tmp_path, resume_step, trackers=opened)
        for step in steps:
            writer.write(metrics_of(step) | {"reward/mean": reward})
        writer.close()
        assert not said
        time.sleep(
            1.0
        )  # Files of the same second are read in the order of their names, whose last numbers are not padded.
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/mean")] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_failing_tracker_is_reported_once_and_others_continue(tmp_path: Path) -> None:
    opened, said = trackers(tmp_path, own("ClosedTracker"), own("FailingTracker"), TrackerConfig(name="tensorboard"))
    writer = MetricsWriter(tmp_path, trackers=opened)
    for step in range(1, 4):
        writer.write(metrics_of(step))
    writer.close()
    goes_on = "; the run goes on, and metrics.jsonl has every number"
    assert said == [
        f"tracker {__file__}:ClosedTracker: ConnectionError: no such project{goes_on}",
        f"tracker {__file__}:FailingTracker: ConnectionError: no answer from the server{goes_on}",
    ]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == [1, 2, 3]


def test_a_setting_that_a_tracker_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tracker 'tensorboard' .*'project'.* Known: none"):
        check_tracker("tensorboard", tmp_path, {"project": "braid"})


def test_wandb_project_comes_from_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert [tracker.name for tracker in default_trackers()] == ["tensorboard"]

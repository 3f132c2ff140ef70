"""Trackers get every finite number of every step; one that fails costs a line and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from braidrl.config import TrackerConfig
from braidrl.config.config import default_trackers
from braidrl.errors import UserError
from braidrl.observe.metrics import MetricsWriter, read_metrics
from braidrl.observe.trackers import TrackedRun, Trackers, check_tracker
from tests.observe.made_up import metrics_of


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
    """Cannot be opened."""

    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no such project")


def own(name: str) -> TrackerConfig:
    return TrackerConfig(name=f"{__file__}:{name}")


def trackers(folder: Path, *chosen: TrackerConfig, resume_step: int | None = None) -> tuple[Trackers, list[str]]:
    said: list[str] = []
    return Trackers(chosen, TrackedRun(folder, {}, resume_step), said.append), said


def test_tensorboard_keeps_its_contract(tmp_path: Path) -> None:
    check_tracker("tensorboard", tmp_path)


def test_tensorboard_shows_the_resumed_steps_once(tmp_path: Path) -> None:
    for resume_step, steps, reward in ((None, range(1, 5), 1.0), (2, [3], 9.0)):
        opened, said = trackers(tmp_path, TrackerConfig(name="tensorboard"), resume_step=resume_step)
        writer = MetricsWriter(tmp_path, resume_step, trackers=opened)
        for step in steps:
            writer.write(metrics_of(step) | {"reward/mean": reward})
        writer.close()
        assert not said
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/mean")] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"tracker 'tensorboard' has no setting 'project'. Known: none"):
        check_tracker("tensorboard", tmp_path, {"project": "braid"})


def test_by_default_wandb_is_told_only_where_its_environment_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert [tracker.name for tracker in default_trackers()] == ["tensorboard"]

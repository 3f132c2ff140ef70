"""Where a run's metrics go beside `metrics.jsonl`: TensorBoard, wandb, or a tracker of a user's own.

config.trackers ──factory(run, **params)──▶ tracker ◀──write(step, metrics)── every step

`check_tracker` says whether a tracker of your own does what a run needs.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from braidrl.config import TrackerConfig
from braidrl.importing import PluginRegistry


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of its run when it is opened."""

    folder: Path
    """The run folder; its name is the run's."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration as plain YAML values."""
    resume_step: int | None = None
    """The step after which a resumed run goes on; what was written of later steps is written again."""


class Tracker(Protocol):
    """Takes the numbers of each step. What it raises is told in a line, and the run goes on."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. Steps come in order.

        Args:
            step: From 1.
            metrics: Finite numbers by name, in the units that docs/metrics.md gives.
        """

    def close(self) -> None:
        """Write what is left; called once, however the run ends."""


TRACKERS = PluginRegistry(
    "tracker",
    {"tensorboard": "braidrl.observe.trackers:TensorboardTracker", "wandb": "braidrl.observe.trackers:WandbTracker"},
)
"""What opens a tracker: called with a `TrackedRun` and the `params` of the configuration, it returns a `Tracker`."""


class Trackers:
    """All trackers of a run. The first error of each is told in a line; neither the run nor the others notice."""

    def __init__(self, chosen: Sequence[TrackerConfig], run: TrackedRun, say: Callable[[str], object]) -> None:
        """Open the chosen trackers; `say` prints a line."""
        self._say, self._told = say, set[str]()
        self._open: list[tuple[str, Tracker]] = []
        for one in chosen:
            with self._errors_told(one.name):
                self._open.append((one.name, TRACKERS.find(one.name)(run, **one.params)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step's metrics to every tracker."""
        for name, tracker in self._open:
            with self._errors_told(name):
                tracker.write(step, metrics)

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in self._open:
            with self._errors_told(name):
                tracker.close()

    @contextmanager
    def _errors_told(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._told:
                self._told.add(name)
                what = " ".join(f"{type(error).__name__}: {error}".split())
                self._say(f"tracker {name}: {what}; the run goes on, and metrics.jsonl has every number")


class TensorboardTracker:
    """Event files in the run folder's `tensorboard`; on resume they hide what was written after the checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        # Imported here: it costs a second, and reading metrics needs none of it.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resume_step is None else run.resume_step + 1
        self._writer: Any = SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A wandb run named after the run folder; wandb's own variables, such as WANDB_PROJECT, say where."""

    def __init__(self, run: TrackedRun, **settings: Any) -> None:
        """Take further arguments of `wandb.init` as settings."""
        name = run.folder.name
        # One id per run folder, so that a resumed run goes on in the same wandb run.
        arguments = {"dir": str(run.folder), "id": name, "name": name, "resume": "allow", **settings}
        self._run = importlib.import_module("wandb").init(**arguments)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def check_tracker(name: str, folder: Path, params: Mapping[str, Any] | None = None) -> None:
    """Open a tracker, write some steps, close it, and go on as a resumed run does.

    Args:
        name: as in the configuration's `trackers`.
        folder: an empty folder, in place of the run's.
        params: settings of the tracker.

    Raises:
        UserError: where there is no such tracker, or it has no such setting.
        AssertionError: where it does not do what a run needs.
    """
    TRACKERS.check_settings(name, params or {})
    config = {"flow": "grpo", "trainer": {"steps": 4}}
    metrics = {"reward/mean": 0.5, "eval/held out/avg@8": 1.0, "tokens/generated": 12}
    for resume_step, steps in ((None, (0, 1, 2)), (1, (2, 3))):
        tracker = TRACKERS.find(name)(TrackedRun(folder, json.loads(json.dumps(config)), resume_step), **(params or {}))
        for step in steps:
            given = dict(metrics)
            tracker.write(step, given)
            assert given == metrics, f"{name} changed the metrics that it was given, which others are given too"
        tracker.close()

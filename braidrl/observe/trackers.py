"""Trackers: external destinations of a run's metrics, samples and report, chosen by name or written by the user.

config.trackers ──factory(run, **params)──▶ tracker ◀──write(step, metrics)────────── every step
                                                   ◀──write_samples(step, samples)── every `samples_every` steps
                                                   ◀──write_report(path)──────────── at the end

Built in are TensorBoard, wandb, trackio, MLflow and SwanLab. Each library is imported when its tracker opens. A
tracker's run has the name of the run folder; a resumed run finds it by this name. `check_tracker` is the contract test
for your own.
"""

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from braidrl.config import TrackerConfig
from braidrl.errors import UserError
from braidrl.importing import PluginRegistry
from braidrl.parsing import DUMPER, flat

PROJECT = "braid"
"""Default project (or experiment) for trackers that require one."""
PARAMETERS_AT_A_TIME = 100
Samples = Sequence[Mapping[str, Any]]
"""Recorded responses with step, set, prompt, response, answer, score, correct and finish_reason; unknown values are
None.
"""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker gets when it opens."""

    folder: Path
    """The run folder; its name is the name of the run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The full configuration as plain YAML values."""
    resume_step: int | None = None
    """Last step before a resume; later steps are written again."""


class Tracker(Protocol):
    """Receives the metrics of each step.

    An error that it raises is printed in one line, and the run continues. It may also have `write_samples(step,
    samples)`, which gets some recorded responses of a step, at least one, and `write_report(report)`, which gets the
    path of the report; the file stays in the run folder.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, from 1, in order: finite numbers by name, in the units of docs/metrics.md."""

    def close(self) -> None:
        """Flush and close; called once, also after a failed run."""


TRACKERS = PluginRegistry(
    "tracker",
    {
        "tensorboard": "braidrl.observe.trackers:TensorboardTracker",
        "wandb": "braidrl.observe.trackers:WandbTracker",
        "trackio": "braidrl.observe.trackers:TrackioTracker",
        "mlflow": "braidrl.observe.trackers:MlflowTracker",
        "swanlab": "braidrl.observe.trackers:SwanlabTracker",
    },
    arguments=("run",),
    methods=("write", "close"),
)
"""Opens a tracker: called with a `TrackedRun` and the configured `params`, returns a `Tracker`."""


class Trackers:
    """All trackers of a run.

    A tracker's first error is printed in one line; the run and the other trackers continue.
    """

    def __init__(
        self, chosen: Sequence[TrackerConfig], run: TrackedRun, say: Callable[[str], object], must_open: bool = False
    ) -> None:
        """Open the chosen trackers in order.

        If `must_open`, one that cannot be opened raises UserError; otherwise `say` prints a line.
        """
        self._say, self._reported = say, set[str]()
        self._open: list[tuple[TrackerConfig, Any]] = []
        for setting in chosen:
            with self._errors_of(setting.name, raised=must_open):
                self._open.append((setting, TRACKERS.make(setting.name, run, **setting.params)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for setting, tracker in self._open:
            with self._errors_of(setting.name):
                tracker.write(step, metrics)

    def write_samples(self, step: int, read: Callable[[], Samples]) -> None:
        """Send recorded responses of a step to the trackers that are due; reads them only if there are any."""
        samples: Samples | None = None
        for setting, tracker in self._open:
            if setting.samples_every and step % setting.samples_every == 0 and hasattr(tracker, "write_samples"):
                with self._errors_of(setting.name):
                    samples = read() if samples is None else samples
                    if samples:
                        tracker.write_samples(step, samples)

    def write_report(self, report: Path) -> None:
        for setting, tracker in self._open:
            with self._errors_of(setting.name):
                if hasattr(tracker, "write_report"):
                    tracker.write_report(report)

    def close(self) -> None:
        for setting, tracker in self._open:
            with self._errors_of(setting.name):
                tracker.close()

    @contextmanager
    def _errors_of(self, name: str, raised: bool = False) -> Iterator[None]:
        """Print a tracker's first error, or, with `raised`, close all trackers and raise UserError."""
        try:
            yield
        except Exception as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            if raised:
                self.close()
                raise UserError(
                    f"trackers={name} cannot be opened ({what}); fix that, or leave it out of trackers"
                ) from error
            if name not in self._reported:
                self._reported.add(name)
                self._say(f"tracker {name}: {what}; the run goes on, and metrics.jsonl has every number")


class TensorboardTracker:
    """Event files in the run folder's `tensorboard`. A resumed run hides events after the checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        # Imported here: it takes a second, and readers of metrics do not need it.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resume_step is None else run.resume_step + 1
        self._folder = run.folder / "tensorboard"
        self._writer: Any = SummaryWriter(log_dir=str(self._folder), purge_step=purge_step)
        config = yaml.dump(dict(run.config), Dumper=DUMPER, sort_keys=False)
        self._writer.add_text("configuration", f"```yaml\n{config}```", 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # Without its folder, the thread of tensorboard that writes prints a traceback.
        os.stat(self._folder)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Samples) -> None:
        os.stat(self._folder)
        cells = (["" if value is None else str(value) for value in sample.values()] for sample in samples)
        escaped = ([text.replace("|", "\\|").replace("\n", "<br>") for text in texts] for texts in cells)
        rows = [list(samples[0]), ["---"] * len(samples[0]), *escaped]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)

    def close(self) -> None:
        self._writer.close()


class LoggedRun:
    """A run of a library that logs numbers by step: wandb, trackio and SwanLab."""

    _run: Any

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(LoggedRun):
    """A wandb run named after the run folder. wandb's own variables, such as WANDB_PROJECT, select the project."""

    def __init__(self, run: TrackedRun, **settings: Any) -> None:
        """Open the run; further settings go to `wandb.init`."""
        name = run.folder.name
        # One id per run folder, so that a resumed run continues in the same wandb run.
        arguments = {
            "dir": str(run.folder),
            "id": name,
            "name": name,
            "resume": "allow",
            "config": dict(run.config),
            **settings,
        }
        self._library: Any = importlib.import_module("wandb")
        self._run = self._library.init(**arguments)

    def write_samples(self, step: int, samples: Samples) -> None:
        # Scores and answers may be missing or of mixed types, which wandb refuses.
        table = self._library.Table(
            list(samples[0]), [list(sample.values()) for sample in samples], allow_mixed_types=True
        )
        self._run.log({"samples": table}, step=step)

    def write_report(self, report: Path) -> None:
        artifact = self._library.Artifact(f"{self._run.id}-report", type="report")
        artifact.add_file(str(report))
        self._run.log_artifact(artifact)


class TrackioTracker(LoggedRun):
    """A trackio run named after the run folder: in the local database, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL
    point.
    """

    def __init__(self, run: TrackedRun, *, project: str = PROJECT, **settings: Any) -> None:
        """Open the run; further settings go to `trackio.init`."""
        self._library: Any = importlib.import_module("trackio")
        arguments = {"name": run.folder.name, "resume": "allow", "config": dict(run.config), "embed": False, **settings}
        self._run = self._library.init(project, **arguments)

    def write_samples(self, step: int, samples: Samples) -> None:
        self._run.log({"samples": self._library.Table(data=[dict(sample) for sample in samples])}, step=step)

    def write_report(self, report: Path) -> None:
        self._run.log_artifact(report, name=f"{self._run.name}-report", type="report")


class MlflowTracker:
    """An MLflow run named after the run folder.

    MLFLOW_TRACKING_URI selects the server. MLflow allows no @, so it becomes _at_.
    """

    def __init__(self, run: TrackedRun, *, uri: str | None = None, experiment: str = PROJECT) -> None:
        """Open the run in an experiment, created if missing, at a server or database as `sqlite:///mlflow.db`, or
        MLFLOW_TRACKING_URI.
        """
        self._library: Any = importlib.import_module("mlflow")
        self._client = self._library.MlflowClient(uri)
        existing = self._client.get_experiment_by_name(experiment)
        where = existing.experiment_id if existing else self._client.create_experiment(experiment)
        # The folder identifies the run: other runs may have the same name.
        folder = {"braid.folder": str(run.folder.resolve())}
        runs = self._client.search_runs([where], f"tags.`braid.folder` = '{folder['braid.folder']}'")
        opened = runs[0] if runs else self._client.create_run(where, run_name=run.folder.name, tags=folder)
        self._id = opened.info.run_id
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        if not runs:
            param = self._library.entities.Param
            settings = [param(mlflow_name(name), str(value)) for name, value in flat(run.config)]
            for first in range(0, len(settings), PARAMETERS_AT_A_TIME):
                self._client.log_batch(self._id, params=settings[first : first + PARAMETERS_AT_A_TIME])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._library.entities.Metric
        self._client.log_batch(self._id, [metric(mlflow_name(n), value, now, step) for n, value in metrics.items()])

    def write_samples(self, step: int, samples: Samples) -> None:
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        self._client.log_table(self._id, columns, "samples.json")

    def write_report(self, report: Path) -> None:
        self._client.log_artifact(self._id, str(report))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


class SwanlabTracker(LoggedRun):
    """A SwanLab run named after the run folder.

    SWANLAB_MODE=local or offline keeps it in the run folder's `swanlab`.
    """

    def __init__(self, run: TrackedRun, **settings: Any) -> None:
        """Open the run; further settings go to `swanlab.init`."""
        self._library: Any = importlib.import_module("swanlab")
        (run.folder / "swanlab").mkdir(parents=True, exist_ok=True)
        arguments = {
            "project": PROJECT,
            "name": run.folder.name,
            "id": run.folder.name,
            "resume": "allow",
            "config": dict(run.config),
            "log_dir": str(run.folder / "swanlab"),
            **settings,
        }
        self._run = self._library.init(**arguments)

    def write_samples(self, step: int, samples: Samples) -> None:
        table = self._library.echarts.Table()
        cells = [["" if value is None else str(value) for value in sample.values()] for sample in samples]
        table.add(list(samples[0]), cells)
        self._run.log({"samples": table}, step=step)

    def write_report(self, report: Path) -> None:
        self._run.save(str(report), base_path=str(report.parent), policy="now")


def check_tracker(name: str, folder: Path, params: Mapping[str, Any] | None = None) -> None:
    """Use a tracker as a run and its resumption do, in an empty folder. Raises UserError for a wrong name, and
    AssertionError for a failed check.
    """
    TRACKERS.check_settings(name, params or {})
    config = {"flow": "grpo", "trainer": {"steps": 4}}
    metrics = {"reward/mean": 0.5, "eval/held out/avg@8": 1.0, "tokens/generated": 12}
    sample: dict[str, Any] = dict.fromkeys(("set", "prompt", "response", "answer", "finish_reason"), "∑ 😀 |\n")
    sample |= {"score": None, "correct": True}
    report = folder / "report.html"
    report.write_text("<p>report</p>")
    for resume_step, steps in ((None, (0, 1, 2)), (1, (2, 3))):
        tracker = TRACKERS.make(name, TrackedRun(folder, json.loads(json.dumps(config)), resume_step), **(params or {}))
        for step in steps:
            sent = dict(metrics)
            tracker.write(step, sent)
            assert sent == metrics, f"{name} changed the metrics that it was given, which others are given too"
            if hasattr(tracker, "write_samples"):
                tracker.write_samples(step, [{"step": step, **sample}])
        if hasattr(tracker, "write_report"):
            tracker.write_report(report)
        tracker.close()

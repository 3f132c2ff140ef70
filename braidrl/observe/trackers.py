"""Trackers: external destinations of a run's metrics, samples and report, chosen by name or written by the user.

config.trackers ──factory(run, **params)──▶ tracker ◀──write(step, metrics)────────── every step
                                                   ◀──write_samples(step, samples)── every `samples_every` steps
                                                   ◀──write_report(path)──────────── at the end

`tracker_libraries.py` holds the built-in trackers. `check_tracker` is the contract test for your own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from braidrl.config import TrackerConfig
from braidrl.errors import UserError
from braidrl.importing import PluginRegistry


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker gets when it opens."""

    folder: Path
    """The run folder; its name is the name of the run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration as plain YAML values."""
    resume_step: int | None = None
    """Last step before a resume; later steps are written again."""


class Tracker(Protocol):
    """Takes the numbers of each step. An error that it raises is printed in one line, and the run continues."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, from 1, in order: finite numbers by name, in the units of docs/metrics.md."""

    def close(self) -> None:
        """Flush and close; called once, also after a failed run."""


Samples = Sequence[Mapping[str, Any]]
"""Recorded responses with step, set, prompt, response, answer, score, correct and finish_reason; unknown values are None."""


@runtime_checkable
class TakesSamples(Protocol):
    """A tracker that also shows responses."""

    def write_samples(self, step: int, samples: Samples) -> None:
        """Take some recorded responses of a step, at least one."""


@runtime_checkable
class TakesReport(Protocol):
    """A tracker that also keeps the run's report."""

    def write_report(self, report: Path) -> None:
        """Take the report file; the file itself stays in the run folder."""


TRACKERS = PluginRegistry(
    "tracker",
    {
        "tensorboard": "braidrl.observe.tracker_libraries:TensorboardTracker",
        "wandb": "braidrl.observe.tracker_libraries:WandbTracker",
        "trackio": "braidrl.observe.tracker_libraries:TrackioTracker",
        "mlflow": "braidrl.observe.tracker_libraries:MlflowTracker",
        "swanlab": "braidrl.observe.tracker_libraries:SwanlabTracker",
    },
)
"""Opens a tracker: called with a `TrackedRun` and the configured `params`, returns a `Tracker`."""


class Trackers:
    """All trackers of a run. A tracker's first error is printed in one line; the run and the other trackers continue."""

    def __init__(
        self, chosen: Sequence[TrackerConfig], run: TrackedRun, say: Callable[[str], object], must_open: bool = False
    ) -> None:
        """Open the chosen trackers in order. If `must_open`, one that cannot be opened raises UserError; else `say` prints a line."""
        self._say, self._reported = say, set[str]()
        self._open: list[tuple[TrackerConfig, Tracker]] = []
        for one in chosen:
            with self._errors_of(one.name, raised=must_open):
                self._open.append((one, TRACKERS.find(one.name)(run, **one.params)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for one, tracker in self._open:
            with self._errors_of(one.name):
                tracker.write(step, metrics)

    def write_samples(self, step: int, read: Callable[[], Samples]) -> None:
        """Pass recorded responses of a step to the trackers that are due; reads them only if there are any."""
        samples: Samples | None = None
        for one, tracker in self._open:
            if one.samples_every and step % one.samples_every == 0 and isinstance(tracker, TakesSamples):
                with self._errors_of(one.name):
                    samples = read() if samples is None else samples
                    if samples:
                        tracker.write_samples(step, samples)

    def write_report(self, report: Path) -> None:
        for one, tracker in self._open:
            if isinstance(tracker, TakesReport):
                with self._errors_of(one.name):
                    tracker.write_report(report)

    def close(self) -> None:
        for one, tracker in self._open:
            with self._errors_of(one.name):
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
                    f"trackers={name} cannot be opened ({what}); mend that, or leave it out of trackers"
                ) from error
            if name not in self._reported:
                self._reported.add(name)
                self._say(f"tracker {name}: {what}; the run goes on, and metrics.jsonl has every number")


def check_tracker(name: str, folder: Path, params: Mapping[str, Any] | None = None) -> None:
    """Open a tracker in an empty folder, write steps, samples and a report, close it, and continue as a resumed run does.

    Raises UserError if there is no such tracker or setting, and AssertionError if it breaks the contract.
    """
    TRACKERS.check_settings(name, params or {})
    config = {"flow": "grpo", "trainer": {"steps": 4}}
    metrics = {"reward/mean": 0.5, "eval/held out/avg@8": 1.0, "tokens/generated": 12}
    sample = dict.fromkeys(("set", "prompt", "response", "answer", "finish_reason"), "∑ 😀 |\n") | {
        "score": None,
        "correct": True,
    }
    report = folder / "report.html"
    report.write_text("<p>report</p>")
    for resume_step, steps in ((None, (0, 1, 2)), (1, (2, 3))):
        tracker = TRACKERS.find(name)(TrackedRun(folder, json.loads(json.dumps(config)), resume_step), **(params or {}))
        for step in steps:
            given = dict(metrics)
            tracker.write(step, given)
            assert given == metrics, f"{name} changed the metrics that it was given, which others are given too"
            if isinstance(tracker, TakesSamples):
                tracker.write_samples(step, [{"step": step, **sample}])
        if isinstance(tracker, TakesReport):
            tracker.write_report(report)
        tracker.close()

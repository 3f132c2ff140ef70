"""Shared code of the demos that imitate a teacher first and then learn by reinforcement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model


def imitate_then_learn(settings: Path, folder: Path) -> Path:
    """Run `warm_start.yaml` of `settings`, then its `config.yaml` from the resulting model in `folder`; return the
    second run.
    """
    export_model(train(load_config(settings / "warm_start.yaml")), folder / "model")
    return train(load_config(settings / "config.yaml"))


def run_demo(settings: Path, prepare: Callable[[Path, int], None], metric: str, shown: str) -> None:
    """Prepare data and model, run both stages, and print how a metric rose; `shown` is what it counts."""
    folder = Path("build") / settings.name
    prepare(folder, 0)
    run = imitate_then_learn(settings, folder)
    before, after = first_and_last(run, metric)
    print(f"{shown} rose from {before:.2f} to {after:.2f}; sample responses: {run / 'report.html'}")


def first_and_last(run: Path, metric: str) -> tuple[float, float]:
    """Return a metric's first and last value in a run's metrics."""
    values = [line[metric] for line in read_metrics(run) if line.get(metric) is not None]
    return values[0], values[-1]

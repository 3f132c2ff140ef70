"""Shared code of the demos that imitate a teacher first and then learn by reinforcement."""

from __future__ import annotations

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


def first_and_last(run: Path, metric: str) -> tuple[float, float]:
    """Return a metric's first and last value in a run's metrics."""
    values = [line[metric] for line in read_metrics(run) if line.get(metric) is not None]
    return values[0], values[-1]

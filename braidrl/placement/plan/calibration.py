"""Fit what Braid reaches of a device from the traces of real runs.

run/trace ──seconds of each stage──┐
run/config, rollouts ──Work──▶ unit costs ──least squares, nothing negative──▶ Rates
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import yaml

from braidrl.errors import UserError
from braidrl.flow import Kind, Stage
from braidrl.flow.flow import is_optimized
from braidrl.observe.trace import Span
from braidrl.placement.memory import Deployment
from braidrl.placement.plan.problem import Problem
from braidrl.placement.plan.rates import Phase, PhaseRates, Rates, RuntimeRates, Work
from braidrl.placement.plan.work import Lengths, Nodes, infer_work, train_work

WARM_UP = 2
"""Iterations at a run's beginning that are not looked at: kernels are compiled and memory is found."""
MEASURES: dict[Phase, tuple[str, ...]] = {
    "train": ("operations", "memory", "calls", "rows", "steps"),
    "infer": ("operations", "calls", "rows", "steps"),
    "prefill": (),
    "decode": ("operations", "memory", "calls", "rows"),
}
"""What the seconds of a phase are made of; prompts of generation are priced as inference."""


@dataclass(frozen=True)
class Observed:
    """A run that has been made: its problem, with the lengths of each step's rows, its trace and the seconds of its steps."""

    problem: Problem
    lengths: Mapping[int, Lengths]
    spans: Sequence[Span]
    step_seconds: Mapping[int, float]
    workers: int = 1


def stage_seconds(spans: Sequence[Span]) -> dict[tuple[str, int], float]:
    """Return the seconds of each stage in each iteration: those of the worker that was busy with it longest."""
    busy: dict[tuple[str, int, str], float] = defaultdict(float)
    for span in spans:
        if span.state == "busy":
            busy[span.stage, span.iteration, span.worker] += span.seconds
    found: dict[tuple[str, int], float] = defaultdict(float)
    for (stage, iteration, _), seconds in busy.items():
        found[stage, iteration] = max(found[stage, iteration], seconds)
    return dict(found)


def works(problem: Problem, stage: Stage, use: Deployment, devices: int) -> list[Work]:
    """Return the work of a stage of a model on its busiest device, by phase."""
    nodes, model = Nodes(problem.cluster.groups[0].devices), problem.models[str(stage.role)]
    if stage.kind is Kind.GENERATE:
        return list(problem.generation(use, devices, nodes))
    if stage.kind is Kind.INFER:
        return [infer_work(model.plain, use.layout, problem.lengths, use.tokens, model.scalar, nodes)]
    trainer = problem.config.trainer
    return [
        train_work(
            model.shape, use.layout, problem.lengths, use.tokens, use.checkpointing, model.scalar, nodes, problem.updates,
            trainer.epochs,
        )
    ]  # fmt: skip


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients, none negative, that make the relative errors of the sums smallest.

    Args:
        rows: quantities, (R, K). seconds: what they took, (R,).
    """
    a = np.array(rows, dtype=np.float64) / np.array(seconds)[:, None]
    width = a.shape[1]
    best: tuple[float, list[float]] = (float("inf"), [0.0] * width)
    # Of so few quantities every subset can be tried; the best one without negative numbers is the answer.
    for count in range(1, width + 1):
        for kept in itertools.combinations(range(width), count):
            part = a[:, kept]
            scale = np.abs(part).max(axis=0)
            if (scale == 0).any():
                continue
            found = np.linalg.lstsq(part / scale, np.ones(len(a)), rcond=None)[0] / scale
            if (found < 0).any():
                continue
            error = float(((part @ found - 1.0) ** 2).sum())
            if error < best[0] - 1e-9:
                best = (error, [float(found[kept.index(i)]) if i in kept else 0.0 for i in range(width)])
    return best[1]


def calibrate(runs: Sequence[Observed], deploy: Any, before: Rates | None = None) -> Rates:
    """Return the rates that fit some runs on one kind of device.

    Args:
        deploy: gives a role's deployment and its number of devices in a run's configuration.

    Raises:
        UserError: where the runs have no iteration after the first ones.
    """
    samples: dict[Phase, list[tuple[list[float], float]]] = defaultdict(list)
    compute: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        seen = stage_seconds(run.spans)
        for (name, iteration), seconds in seen.items():
            stages = [stage for stage in run.problem.flow.stages if stage.name == name]
            if iteration <= WARM_UP or iteration not in run.lengths or not stages or seconds <= 0:
                continue
            problem = replace(run.problem, lengths=run.lengths[iteration])
            stage = stages[0]
            if stage.kind in (Kind.COMPUTE, Kind.SELECT) or stage.role not in problem.models:
                compute[stage.type].append(seconds / problem.rows)
            elif stage.kind is Kind.GENERATE or stage.kind is Kind.INFER or is_optimized(stage):
                use, devices = deploy(problem, stage)
                done = works(problem, stage, use, devices)
                phase = done[-1].phase
                samples[phase].append((quantities(done, phase), seconds))
    if not samples:
        raise UserError(f"--calibrate: the runs have no iterations after the first {WARM_UP}; make longer ones")
    kind = runs[0].problem.kind(runs[0].problem.cluster.groups[0])
    dtype = next(iter(runs[0].problem.models.values())).dtype
    rates = before or Rates()
    fitted: dict[str, Any] = {}
    for phase, measured in samples.items():
        found = dict(zip(MEASURES[phase], least_squares(*zip(*measured, strict=True)), strict=True))
        fitted[phase] = phase_rates(found, kind.peak[dtype])
        if phase == "decode" and found["memory"] > 0:
            fitted["memory"] = 1.0 / (found["memory"] * kind.bandwidth)
    if "infer" in fitted:
        fitted["prefill"] = fitted["infer"]
    fitted["stages"] = {**rates.stages, **{name: median(values) for name, values in compute.items()}}
    return rates.model_copy(update=fitted)


def quantities(done: Sequence[Work], phase: Phase) -> list[float]:
    """Return what a phase's seconds are made of, prompts of generation among its operations and layers."""
    return [sum(float(getattr(work, name)) for work in done) for name in MEASURES[phase]]


def phase_rates(found: Mapping[str, float], peak: float) -> PhaseRates:
    """Return unit costs as rates; operations that cost nothing are given the peak."""
    share = 1.0 / (found["operations"] * peak) if found["operations"] > 0 else 1.0
    return PhaseRates(
        share=share, call_s=found.get("calls", 0.0), row_s=found.get("rows", 0.0), step_s=found.get("steps", 0.0)
    )


def runtime_rates(pairs: Sequence[tuple[int, float]]) -> RuntimeRates:
    """Return what a runtime adds, from (rows of a step, seconds that its stages do not explain)."""
    left = [(rows, max(1e-4, seconds)) for rows, seconds in pairs]
    if len({rows for rows, _ in left}) < 2:
        return RuntimeRates(iteration_s=median(seconds for _, seconds in left))
    base, each = least_squares([(1.0, float(rows)) for rows, _ in left], [seconds for _, seconds in left])
    return RuntimeRates(iteration_s=base, row_s=each)


def written_rates(rates: Mapping[str, Rates]) -> str:
    """Return rates as the YAML that `read_rates` reads."""
    return yaml.safe_dump({kind: one.model_dump(mode="json") for kind, one in rates.items()}, sort_keys=False)


__all__ = ["Observed", "calibrate", "least_squares", "runtime_rates", "stage_seconds", "written_rates"]

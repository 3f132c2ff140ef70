"""Fit what Braid reaches of a device from the traces of real runs.

run/trace ──seconds of each stage──┐
run/config, rollouts ──Work──▶ quantities ──least squares, nothing negative──▶ unit costs ──▶ Rates
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from braidrl.cluster.device_kinds import DeviceKind
from braidrl.errors import UserError
from braidrl.flow import Kind
from braidrl.flow.flow import is_optimized
from braidrl.observe.trace import Span
from braidrl.plan.configured import deployment, devices_of, predicted
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Phase, PhaseRates, Rates, RuntimeRates, Work, rates_for
from braidrl.plan.work import Lengths

WARM_UP = 2
"""Iterations at a run's beginning that are not looked at: kernels are compiled and memory is found."""
OWN = ("operations", "activations", "tokens", "calls", "rows", "steps")
"""What each phase has a unit cost of its own for."""
SHARED = ("memory", "link", "network", "collectives")
"""What costs the same in all phases."""
FITTED_AS: Mapping[Phase, Phase] = {"train": "train", "infer": "infer", "prefill": "infer", "decode": "decode"}
"""Prompts of generation are priced as inference: no stage has their seconds apart."""


REWEIGHED = 20
"""Rounds in which errors are weighed anew."""
SMALL = 0.02
"""Relative errors below this are not told apart."""


@dataclass(frozen=True)
class Observed:
    """A run that has been made: its problem, with the lengths of each step's rows, its trace and the seconds of its steps."""

    problem: Problem
    lengths: Mapping[int, Lengths]
    spans: Sequence[Span]
    step_seconds: Mapping[int, float]

    def steps(self) -> Iterator[tuple[int, Problem]]:
        """Yield each step after the first ones, with the problem that its rows were."""
        for step, lengths in self.lengths.items():
            if step > WARM_UP:
                yield step, replace(self.problem, lengths=lengths)


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


def quantities(done: Iterable[Work], behind: float) -> dict[str, float]:
    """Return what the seconds of a stage are made of, by the name of its unit cost.

    Args:
        behind: the share of computing that communication hides behind. Where it is 1, what travels then is not seen.
    """
    found: dict[str, float] = defaultdict(float)
    for work in done:
        for name in OWN:
            found[f"{FITTED_AS[work.phase]}.{name}"] += float(getattr(work, name))
        found["memory"] += work.memory
        found["link"] += work.link + (1 - behind) * work.behind_link
        found["network"] += work.network + (1 - behind) * work.behind_network
        found["collectives"] += work.collectives
    return {name: value for name, value in found.items() if value}


def least_squares(
    samples: Sequence[Mapping[str, float]], seconds: Sequence[float], known: Sequence[float] = ()
) -> dict[str, float]:
    """Return the unit costs, none negative, that make the relative errors of the sums smallest.

    What other work on the machine has slowed counts less: errors are weighed until their sum is least, not that of their squares.

    Args:
        samples: quantities by name. seconds: what they took. known: those of them that something else took.
    """
    names = sorted({name for sample in samples for name in sample})
    took = np.array(seconds)
    a = np.array([[sample.get(name, 0.0) for name in names] for sample in samples]) / took[:, None]
    b = np.ones(len(a)) - (np.array(known) / took if known else 0.0)
    scale = np.abs(a).max(axis=0)
    weight = np.ones(len(a))
    for _ in range(REWEIGHED):
        found = nonnegative(a / scale * weight[:, None], b * weight)
        weight = np.abs(a / scale @ found - b).clip(min=SMALL) ** -0.5
    return dict(zip(names, (found / scale).tolist(), strict=True))


def nonnegative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the x without negative numbers for which a @ x is nearest to b (Lawson and Hanson 1974, chapter 23)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * len(x)):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max(initial=-np.inf) <= 1e-9 * len(b):
            break
        free[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                x = wanted
                break
            # As far towards it as nothing becomes negative; what becomes zero is held there.
            part = (x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min()
            x = x + part * (wanted - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return x


def calibrate(runs: Sequence[Observed], before: Mapping[str, Rates]) -> Rates:
    """Return the rates that fit some runs on one kind of device.

    Args:
        before: rates by kind; what no run shows stays as it is there.

    Raises:
        UserError: where the runs have no iteration after the first ones.
    """
    cluster, models = runs[0].problem.cluster, runs[0].problem.models
    group, rates = cluster.groups[0].kind, rates_for(cluster.groups[0].kind, before)
    samples: list[tuple[dict[str, float], float]] = []
    compute: dict[str, list[float]] = defaultdict(list)
    # Under streaming stages run beside each other: on the same cores each takes longer than its work says.
    apart = [run for run in runs if run.problem.config.runtime != "streaming"]
    for run in apart or runs:
        seen = stage_seconds(run.spans)
        for step, problem in run.steps():
            for stage in problem.flow.stages:
                seconds = seen.get((stage.name, step), 0.0)
                if seconds <= 0:
                    continue
                if stage.kind in (Kind.COMPUTE, Kind.SELECT) or stage.role not in problem.models:
                    compute[stage.type].append(seconds / problem.rows)
                elif stage.kind is not Kind.TRAIN or is_optimized(stage):
                    devices = devices_of(problem, stage)
                    done = problem.works(stage, deployment(problem, stage, devices), cluster.groups[0], devices)
                    samples.append((quantities(done, rates.behind), seconds))
    if not samples:
        raise UserError(f"--calibrate: the runs have no iterations after the first {WARM_UP}; make longer ones")
    costs = least_squares(*zip(*samples, strict=True))
    fitted = fitted_rates(costs, rates, cluster.kinds[group], next(iter(models.values())).dtype)
    stages = {**rates.stages, **{name: median(values) for name, values in compute.items()}}
    fitted = fitted.model_copy(update={"stages": stages, "runtimes": {}})
    return fitted.model_copy(update={"runtimes": {**rates.runtimes, **added(runs, {group: fitted})}})


def fitted_rates(costs: Mapping[str, float], rates: Rates, kind: DeviceKind, dtype: str) -> Rates:
    """Return unit costs as rates; those that no run shows stay as they are."""
    found: dict[str, Any] = {}
    for phase, source in FITTED_AS.items():
        if f"{source}.operations" in costs:
            found[phase] = phase_rates({name: costs.get(f"{source}.{name}", 0.0) for name in OWN}, kind.peak[dtype])
    for name, full in (("memory", kind.bandwidth), ("link", kind.link), ("network", kind.network)):
        if costs.get(name, 0.0) > 0:
            found[name] = 1.0 / (costs[name] * full)
    if "collectives" in costs:
        found["collective_s"] = costs["collectives"]
    return rates.model_copy(update=found)


def phase_rates(costs: Mapping[str, float], peak: float) -> PhaseRates:
    """Return a phase's unit costs as rates; operations that cost nothing are given ten times the peak."""
    return PhaseRates(
        share=1.0 / (max(costs["operations"], 0.1 / peak) * peak), activation_s=costs["activations"],
        token_s=costs["tokens"], call_s=costs["calls"], row_s=costs["rows"], step_s=costs["steps"],
    )  # fmt: skip


def added(runs: Sequence[Observed], rates: Mapping[str, Rates]) -> dict[str, RuntimeRates]:
    """Return what each runtime adds: the seconds of steps that their stages, priced by the fitted rates, do not explain."""
    seen: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for run in runs:
        for step, problem in run.steps():
            explained = predicted(replace(problem, rates=rates)).seconds
            seen[problem.config.runtime].append((problem.rows, run.step_seconds[step], explained))
    return {runtime: runtime_rates(steps) for runtime, steps in seen.items()}


def runtime_rates(steps: Sequence[tuple[int, float, float]]) -> RuntimeRates:
    """Return what a runtime adds, from (rows of a step, its seconds, those that its stages explain)."""
    rows, seconds, explained = zip(*steps, strict=True)
    samples = [
        {"iteration_s": 1.0, "row_s": float(n), "slower": taken} for n, taken in zip(rows, explained, strict=True)
    ]
    return RuntimeRates(**least_squares(samples, seconds, explained))


def written_rates(rates: Mapping[str, Rates]) -> str:
    """Return rates as the YAML that `read_rates` reads."""
    return yaml.safe_dump({kind: one.model_dump(mode="json") for kind, one in rates.items()}, sort_keys=False)

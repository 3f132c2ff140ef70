"""Calibration: fit a device's achieved rates to the traces of real runs.

run/trace ──seconds of each stage──┐
run/config, rollouts ──Work──▶ quantities ──non-negative least squares──▶ unit costs ──▶ Rates
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from braidrl.cluster.device_kinds import DeviceKind
from braidrl.errors import UserError
from braidrl.flow import Kind
from braidrl.flow.flow import is_optimized
from braidrl.observe.trace import Span
from braidrl.plan.configured import configured_sets, predicted
from braidrl.plan.problem import Problem
from braidrl.plan.rates import BUILT_IN, VLLM, EngineRates, Phase, PhaseRates, Rates, RuntimeRates, Work
from braidrl.plan.work import Lengths

WARM_UP = 2
"""First iterations of a run that are ignored: kernels compile and allocators warm up."""
OWN = ("operations", "activations", "tokens", "calls", "rows", "steps")
"""Quantities whose unit cost is fitted per phase; the others' is the same in all phases."""
FITTED_AS: Mapping[Phase, Phase] = {"train": "train", "infer": "infer", "prefill": "infer", "decode": "decode"}
"""Prefill is priced as inference: traces do not record its seconds separately."""
REWEIGHED = 20
SMALL = 0.02
"""Relative errors below this count as equal."""


@dataclass(frozen=True)
class Observed:
    """A recorded run: its problem, row lengths and seconds by step, and trace."""

    problem: Problem
    lengths: Mapping[int, Lengths]
    spans: Sequence[Span]
    step_seconds: Mapping[int, float]

    def steps(self) -> Iterator[tuple[int, Problem]]:
        """Yield each step after the warm-up, with the problem of its row lengths."""
        for step, lengths in self.lengths.items():
            if step > WARM_UP:
                yield step, replace(self.problem, lengths=lengths)


def calibrate(runs: Sequence[Observed], before: Mapping[str, Rates]) -> Rates:
    """Fit rates to runs on one kind of device; others keep the values of `before`. Raises UserError without an
    iteration after the warm-up.
    """
    cluster, models = runs[0].problem.cluster, runs[0].problem.models
    kind = cluster.groups[0].kind
    rates = before.get(kind) or BUILT_IN.get(kind) or Rates()
    samples: list[tuple[dict[str, float], float]] = []
    compute: dict[str, list[float]] = defaultdict(list)
    # Streaming stages run concurrently and slow each other on shared cores: prefer runs of other runtimes.
    apart = [run for run in runs if not run.problem.deployment.mode.concurrent]
    for run in apart or runs:
        busy: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in run.spans:
            if span.state == "busy":
                busy[span.stage, span.iteration][span.worker] += span.seconds
        placed = {
            stage: (choice.use, configured.devices)
            for configured in configured_sets(run.problem)
            for choice in configured.roles.values()
            for stage in choice.costs
        }
        for step, problem in run.steps():
            for stage in problem.flow.stages:
                # A stage takes as long as its busiest worker.
                seconds = max(busy[stage.name, step].values(), default=0.0)
                if seconds <= 0:
                    continue
                if stage.kind in (Kind.COMPUTE, Kind.SELECT) or stage.role not in problem.models:
                    compute[stage.type].append(seconds / problem.rows)
                elif stage.kind is not Kind.TRAIN or is_optimized(stage):
                    use, devices = placed[stage.name]
                    done = problem.works(stage, use, cluster.groups[0], devices)
                    samples.append((quantities(done, rates.behind, problem.config.rollout.engine), seconds))
    if not samples:
        raise UserError(f"--calibrate: the runs have no iterations after the first {WARM_UP}; make longer ones")
    costs = least_squares(*zip(*samples, strict=True))
    stages = {**rates.stages, **{name: median(values) for name, values in compute.items()}}
    fitted = fitted_rates(costs, rates, cluster.kinds[kind], next(iter(models.values())).dtype)
    fitted = fitted.model_copy(update={"stages": stages, "runtimes": {}})
    # A runtime's overhead: the step seconds that stages at the fitted rates do not explain.
    steps: dict[str, list[tuple[dict[str, float], float, float]]] = defaultdict(list)
    for run in runs:
        for step, problem in run.steps():
            explained = predicted(replace(problem, rates={kind: fitted})).seconds
            sample = {"iteration_s": 1.0, "row_s": float(problem.rows), "slower": explained}
            steps[problem.config.runtime].append((sample, run.step_seconds[step], explained))
    overheads = {name: RuntimeRates(**least_squares(*zip(*measured, strict=True))) for name, measured in steps.items()}
    return fitted.model_copy(update={"runtimes": {**rates.runtimes, **overheads}})


def quantities(done: Iterable[Work], behind: float, engine: str) -> dict[str, float]:
    """Return the quantities of a stage's seconds by their unit cost.

    `behind` is the share of compute that hides communication.
    """
    totals: dict[str, float] = defaultdict(float)
    for work in done:
        for name in OWN:
            # vLLM has separate unit costs for decoding.
            source = "vllm" if work.phase == "decode" and engine in VLLM else FITTED_AS[work.phase]
            totals[f"{source}.{name}"] += float(getattr(work, name))
        totals["memory"] += work.memory
        totals["link"] += work.link + (1 - behind) * work.behind_link
        totals["network"] += work.network + (1 - behind) * work.behind_network
        totals["collectives"] += work.collectives
    return {name: value for name, value in totals.items() if value}


def least_squares(
    samples: Sequence[Mapping[str, float]], seconds: Sequence[float], known_seconds: Sequence[float] = ()
) -> dict[str, float]:
    """Fit non-negative unit costs by least absolute relative error (iteratively reweighted least squares).

    Absolute instead of squared errors reduce the weight of outliers, such as steps slowed by other programs. Each
    sample has its quantities by name, its measured seconds, and the part of these that is already explained
    (`known_seconds`).
    """
    names = sorted({name for sample in samples for name in sample})
    took = np.array(seconds)
    a = np.array([[sample.get(name, 0.0) for name in names] for sample in samples]) / took[:, None]
    b = np.ones(len(a)) - (np.array(known_seconds) / took if known_seconds else 0.0)
    scale = np.abs(a).max(axis=0)
    weight = np.ones(len(a))
    for _ in range(REWEIGHED):
        solution = nonnegative(a / scale * weight[:, None], b * weight)
        weight = np.abs(a / scale @ solution - b).clip(min=SMALL) ** -0.5
    return dict(zip(names, (solution / scale).tolist(), strict=True))


def nonnegative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the non-negative x that minimises |a @ x - b| (Lawson and Hanson 1974, chapter 23)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * len(x)):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max(initial=-np.inf) <= 1e-9 * len(b):
            break
        free[slope.argmax()] = True
        while True:
            unbounded = np.zeros_like(x)
            unbounded[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (unbounded <= 0)
            if not below.any():
                x = unbounded
                break
            # Step towards it until a component reaches zero; fix that one at zero.
            part = (x[below] / np.maximum(x[below] - unbounded[below], 1e-300)).min()
            x = x + part * (unbounded - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return x


def fitted_rates(costs: Mapping[str, float], rates: Rates, kind: DeviceKind, dtype: str) -> Rates:
    """Return unit costs as rates; rates without measurements are unchanged."""
    rates_of: dict[str, tuple[str, PhaseRates]] = {
        **{phase: (source, rates.of(phase)) for phase, source in FITTED_AS.items()},
        "vllm.prefill": ("infer", rates.vllm.prefill),
        "vllm.decode": ("vllm", rates.vllm.decode),
    }
    fitted: dict[str, Any] = {}
    for name, (source, phase_rates) in rates_of.items():
        fitted[name] = phase_rates
        if f"{source}.operations" in costs:
            operations, *unit_costs = (costs.get(f"{source}.{quantity}", 0.0) for quantity in OWN)
            peak = kind.peak[dtype]
            unit = dict(zip(("activation_s", "token_s", "call_s", "row_s", "step_s"), unit_costs, strict=True))
            fitted[name] = PhaseRates(share=1.0 / (max(operations, 0.1 / peak) * peak), **unit)
    fitted["vllm"] = EngineRates(prefill=fitted.pop("vllm.prefill"), decode=fitted.pop("vllm.decode"))
    for name, full in (("memory", kind.bandwidth), ("link", kind.link), ("network", kind.network)):
        if costs.get(name, 0.0) > 0:
            fitted[name] = 1.0 / (costs[name] * full)
    if "collectives" in costs:
        fitted["collective_s"] = costs["collectives"]
    return rates.model_copy(update=fitted)

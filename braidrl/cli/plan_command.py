"""`braid plan`: search for the best plan for a configuration and devices, and calibration of rates from runs.

config ──flow, lengths──▶ Problem ──search──▶ plans ──▶ table, overlay.yaml, trace.json     runs ─calibrate─▶ rates.yaml
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from rich.console import Console

from braidrl.cluster.device_kinds import Cluster, read_cluster
from braidrl.config import Config
from braidrl.data.prompts import LoadedSource, load_train
from braidrl.errors import UserError, suggest
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import recorded_steps
from braidrl.observe.trace import chrome_trace, read_trace
from braidrl.plan.calibration import Observed, calibrate
from braidrl.plan.configured import overlay_of
from braidrl.plan.plan_report import show, spans_of
from braidrl.plan.problem import Problem, batch_lengths, step_lengths
from braidrl.plan.rates import Rates, read_rates
from braidrl.plan.search import Plan, Search
from braidrl.plan.work import Lengths
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.saving.folders import run_config
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision

SHOWN = 8


@dataclass(frozen=True)
class PlanOptions:
    """The options of `braid plan`."""

    devices: str
    lengths: str | None = None
    seconds: Sequence[str] = ()
    rates: Path | None = None
    max_staleness: int | None = None
    time_limit: float | None = None


def plan(
    config: Config, request: PlanOptions, overlay: Path | None, trace: Path | None, console: Console
) -> list[Plan]:
    """Find the best plans, print them, and write the first.

    Raises UserError for configurations that cannot be planned, and for models that do not fit.
    """
    problem = problem_of(config, request)
    plans = best_plans(problem, request)
    show(problem, plans, console)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(spans_of(plans[0]))), encoding="utf-8")
        console.print(f"predicted timeline in {trace}; open it at ui.perfetto.dev", soft_wrap=True, highlight=False)
    if overlay is not None:
        overlay.write_text(yaml.safe_dump(overlay_of(plans[0], problem), sort_keys=False), encoding="utf-8")
        console.print(f"plan 1 is in {overlay}; run braid train CONFIG {overlay}", soft_wrap=True, highlight=False)
    return plans


def problem_of(config: Config, request: PlanOptions) -> Problem:
    """Return the planning problem. Raises UserError for an input that cannot be read."""
    cluster, config = read_cluster(request.devices), with_fetched(config, with_weights=False)
    flow = build_flow(config)
    sources: list[LoadedSource] = []
    # A plan needs no data: lengths may be given instead.
    if config.data.train and all(source.path.exists() for source in config.data.train):
        responses = "response" in flow.needs_from_data()
        tokenizer = load_tokenizer(config.model)
        vision = load_vision(config.model, config.data.images)
        sources = load_train(config.data, tokenizer, responses=responses, pairs=flow.trains_on_pairs, vision=vision)
    lengths = batch_lengths(config, request.lengths, sources)
    rates = read_rates(request.rates) if request.rates is not None else {}
    names = [stage.name for stage in flow.stages]
    seconds_of = {}
    for pair in request.seconds:
        name, _, seconds = pair.rpartition("=")
        if name not in names:
            raise UserError(
                f"--seconds: flow {flow.name} has no stage {name or pair!r}. {suggest(name or pair, names)}"
            )
        try:
            seconds_of[name] = float(seconds)
        except ValueError:
            seconds_of[name] = math.nan
        if not 0 <= seconds_of[name] < math.inf:
            raise UserError(f"--seconds: {pair!r} is not STAGE=SECONDS, as in --seconds {names[0]}=2.5")
    return Problem(config, flow, cluster, lengths, rates, seconds_of)


def best_plans(problem: Problem, request: PlanOptions) -> list[Plan]:
    """Return the best plans of all runtimes, fastest first. Raises UserError if the models fit on no allocation."""
    problem.check_stages()
    until = time.monotonic() + request.time_limit if request.time_limit is not None else None
    search = Search(problem, SHOWN, until)
    plans: list[Plan] = []
    if problem.cluster.size == 1:
        plans += search.colocated("eager")
        plans += [] if plans else search.hybrid()
    else:
        # Where roles share all devices, no controller is needed.
        plans += search.colocated("distributed")
        plans += search.hybrid()
    if any(model.generates for model in problem.models.values()):
        # For each bound on staleness, starting with the configuration's. Staleness adds stages: recomputed log-probs
        # for a correction.
        configured = problem.config.trainer.max_staleness
        for staleness in range(configured, max(configured, request.max_staleness or 0) + 1):
            if search.is_over():
                break
            trainer = problem.config.trainer.model_copy(update={"max_staleness": staleness})
            config = problem.config.model_copy(update={"trainer": trainer, "runtime": "streaming"})
            late = Search(replace(problem, config=config, flow=build_flow(config)), until=until)
            late.has_plan = bool(plans)
            streamed = late.streaming(staleness)
            plans += [streamed] if streamed is not None else []
    return sorted(plans, key=lambda plan: plan.seconds)[:SHOWN]


def calibrated(runs: Sequence[Path], devices: str, file: Path) -> Rates:
    """Fit rates to runs on one kind of device, and add them to a file with the rates of other kinds.

    Raises UserError without rollouts.
    """
    cluster = read_cluster(devices)
    earlier = read_rates(file) if file.is_file() else {}
    rates = calibrate([observe(run, cluster) for run in runs], earlier)
    every = {**earlier, cluster.groups[0].kind: rates}
    plain = {kind: kind_rates.model_dump(mode="json") for kind, kind_rates in every.items()}
    file.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return rates


def observe(run: Path, cluster: Cluster) -> Observed:
    """Return a run's measurements. Raises UserError for a folder that is not a run."""
    config = run_config(run)
    steps = {int(line["step"]): float(line["time/step"]) for line in read_metrics(run) if "time/step" in line}
    lengths = {step: Lengths(*step_lengths(run, step)) for step in recorded_steps(run) if step in steps}
    if not lengths:
        raise UserError(f"--calibrate: {run} recorded no rollouts")
    problem = Problem(config, build_flow(config), cluster, next(iter(lengths.values())))
    return Observed(problem, lengths, read_trace(run), steps)

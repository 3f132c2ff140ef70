"""`braid plan`: search for the best plan for a configuration and devices, and calibration of rates from runs.

config ──flow, lengths──▶ Problem ──search──▶ plans ──▶ table, overlay.yaml, trace.json          runs ──calibrate──▶ rates.yaml
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import yaml
from rich.console import Console

from braidrl.cluster.device_kinds import Cluster, read_cluster
from braidrl.config import Config, PlacementConfig, StreamingConfig, parse_config
from braidrl.config.layout import ParallelLayout
from braidrl.data.prompts import LoadedSource, load_train
from braidrl.errors import UserError, suggest
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import recorded_steps
from braidrl.observe.trace import read_trace, write_chrome_trace
from braidrl.plan.calibration import WARM_UP, Observed, calibrate
from braidrl.plan.configured import overlay_of, predicted
from braidrl.plan.plan_report import show, spans_of
from braidrl.plan.problem import Problem, batch_lengths, step_lengths
from braidrl.plan.rates import Rates, read_rates
from braidrl.plan.search import Plan, Search
from braidrl.plan.work import Lengths
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from braidrl.training.loading import load_tokenizer
from braidrl.training.role_settings import slots_of

SHOWN = 8
MEASURED_ROWS, MEASURED_TOKENS, MEASURED_STEPS = 64, 1024, 4
"""Rows, longest response and steps of the runs of `--measure`."""


@dataclass(frozen=True)
class Wanted:
    """The options of `braid plan`."""

    devices: str
    lengths: str | None = None
    seconds: Sequence[str] = ()
    rates: Path | None = None
    max_staleness: int | None = None
    time_limit: float | None = None
    runtimes: Sequence[str] = field(default_factory=lambda: ("eager", "hybrid", "distributed", "streaming"))


def plan(config: Config, wanted: Wanted, overlay: Path | None, trace: Path | None, console: Console) -> list[Plan]:
    """Find the best plans, print them, and write the first. Raises UserError for what cannot be planned, and for models that do not fit."""
    problem = problem_of(config, wanted)
    plans = best_plans(problem, wanted)
    show(problem, plans, console)
    if trace is not None:
        write_chrome_trace(trace, spans_of(plans[0]))
        console.print(f"predicted timeline in {trace}; open it at ui.perfetto.dev", soft_wrap=True, highlight=False)
    if overlay is not None:
        overlay.write_text(yaml.safe_dump(overlay_of(plans[0], problem), sort_keys=False), encoding="utf-8")
        console.print(
            f"plan 1 is in {overlay}; start it by braid train CONFIG {overlay}", soft_wrap=True, highlight=False
        )
    return plans


def problem_of(config: Config, wanted: Wanted) -> Problem:
    """Return the planning problem. Raises UserError for an input that cannot be read."""
    cluster, config = read_cluster(wanted.devices), with_fetched(config, whole=False)
    flow = build_flow(config)
    sources: list[LoadedSource] = []
    # A plan needs no data: lengths may be given instead.
    if config.data.train and all(source.path.exists() for source in config.data.train):
        given = "response" in flow.needs_from_data()
        tokenizer = load_tokenizer(config.model)
        sources = load_train(config.data, tokenizer, responses=given, pairs=flow.trains_on_pairs)
    lengths = batch_lengths(config, wanted.lengths, sources)
    rates = read_rates(wanted.rates) if wanted.rates is not None else {}
    names = [stage.name for stage in flow.stages]
    found = {}
    for one in wanted.seconds:
        name, _, seconds = one.rpartition("=")
        if name not in names:
            raise UserError(f"--seconds: flow {flow.name} has no stage {name or one!r}. {suggest(name or one, names)}")
        try:
            found[name] = float(seconds)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise UserError(f"--seconds: {one!r} is not STAGE=SECONDS, as in --seconds {names[0]}=2.5")
    return Problem(config, flow, cluster, lengths, rates, found)


def best_plans(problem: Problem, wanted: Wanted) -> list[Plan]:
    """Return the best plans of all runtimes, fastest first. Raises UserError if the models fit on no allocation."""
    problem.check_stages()
    until = time.monotonic() + wanted.time_limit if wanted.time_limit else None
    search = Search(problem, SHOWN, until)
    found: list[Plan] = []
    if problem.cluster.size == 1:
        found += search.colocated("eager")
        found += [] if found else search.hybrid()
    else:
        # Where roles share all devices, no controller is needed.
        found += search.colocated("distributed")
        found += search.hybrid()
    if "streaming" in wanted.runtimes and any(model.generates for model in problem.models.values()):
        # For each bound on staleness from the configuration's on. Staleness adds stages: recomputed log-probs for a correction.
        given = problem.config.trainer.max_staleness
        for staleness in range(given, max(given, wanted.max_staleness or 0) + 1):
            trainer = problem.config.trainer.model_copy(update={"max_staleness": staleness})
            config = problem.config.model_copy(update={"trainer": trainer, "runtime": "streaming"})
            streamed = Search(replace(problem, config=config, flow=build_flow(config))).streaming(staleness)
            found += [streamed] if streamed is not None else []
    found = [one for one in found if one.runtime in wanted.runtimes]
    return sorted(found, key=lambda one: one.seconds)[:SHOWN]


def calibrated(runs: Sequence[Path], devices: str, file: Path) -> Rates:
    """Fit rates to runs on one kind of device, and add them to a file with the rates of other kinds.

    Raises UserError if a folder is not a run, or has no recorded rollouts.
    """
    cluster = read_cluster(devices)
    known = read_rates(file) if file.is_file() else {}
    rates = calibrate([observe(run, cluster) for run in runs], known)
    every = {**known, cluster.groups[0].kind: rates}
    plain = {kind: one.model_dump(mode="json") for kind, one in every.items()}
    file.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return rates


def measured(config: Config, devices: str, file: Path, say: Callable[[str], object]) -> Rates:
    """Fit rates to short runs of a configuration on one device of this machine, and add them to a file as `calibrated`.

    The runs differ in rows and lengths. They use the configuration's model, data and engine, have no layouts, evaluation,
    checkpoints or trackers, and are deleted afterwards. Raises UserError if the configuration cannot run here.
    """
    rows = slots_of(config) if config.rollout.slots else MEASURED_ROWS
    groups = max(2, min(config.trainer.prompts_per_step, rows // config.rollout.samples_per_prompt))
    tokens = min(config.rollout.max_response_tokens, MEASURED_TOKENS)
    sizes = ((groups, tokens), (groups // 2, tokens), (groups, tokens // 4 or 1))
    without_layout = {"layout": None, "inference_layout": None}
    roles = {role: own.model_copy(update=without_layout) for role, own in config.roles.items()}
    with TemporaryDirectory() as folder:
        runs = []
        for number, (prompts, longest) in enumerate(sizes):
            trainer = config.trainer.model_copy(update={
                "steps": WARM_UP + MEASURED_STEPS, "prompts_per_step": prompts, "rows_per_update": None, "layout": ParallelLayout(),
                "inference_layout": None, "max_staleness": 0, "checkpoint_every": 0, "resident_gib": None,
            })  # fmt: skip
            rollout = config.rollout.model_copy(
                update={"max_response_tokens": longest, "tensor": 1, "pipeline": 1, "grouping": None}
            )
            # Validated again: keys depend on each other.
            short = config.model_copy(update={
                "runtime": "eager", "workers": 1, "placement": PlacementConfig(), "streaming": StreamingConfig(), "trainer": trainer,
                "rollout": rollout, "roles": roles, "output": Path(folder), "name": f"measure-{number}", "trackers": [],
                "evaluation": config.evaluation.model_copy(update={"every": 0}),
            })  # fmt: skip
            sized = parse_config(short.model_dump(mode="json", exclude_unset=True))
            with TrainingRun(sized) as run:
                run.train()
            runs.append(run.folder)
        rates = calibrated(runs, devices, file)
        cluster = read_cluster(devices)
        for seen in (observe(run, cluster) for run in runs):
            steps = list(seen.steps())
            said = [predicted(replace(problem, rates={cluster.groups[0].kind: rates})) for _, problem in steps]
            took = median(seen.step_seconds[step] for step, _ in steps)
            say(
                f"{steps[0][1].rows} rows: {took:.3g} s a step, {median(plan.seconds for plan in said):.3g} s by the fitted rates"
            )
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

"""Evaluation: a second flow (generate, verify) with sampling of its own, on one version of the weights."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from braidrl.algorithms.policy_metrics import avg_at_k, pass_at_k
from braidrl.cluster.world import World
from braidrl.config import Config, parse_config
from braidrl.engines.deployment import MODES
from braidrl.errors import FailedStep
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.interfaces import Backend
from braidrl.runtimes.prepare.checks import without_effect
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.first_checks import check_sets
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.prepare.setup import set_up_torch
from braidrl.runtimes.row_store import HeldOut
from braidrl.runtimes.saving.checkpoints import Checkpoints
from braidrl.runtimes.saving.folders import best_checkpoint, check_output, unused_folder, write_config
from braidrl.runtimes.sizing import prepared_to_fit
from braidrl.runtimes.spmd.launch import in_ranks
from braidrl.runtimes.start import start_backend
from braidrl.runtimes.step_metrics import StepMetrics, failures_beyond

SHARE_RIGHT = re.compile(r"eval/.+/(avg@\d+|pair_accuracy)")


def good_enough(metrics: Mapping[str, float | int | None], stop_at: float | None) -> bool:
    """Return True if the metrics contain an evaluation and the accuracy of every set is at least `stop_at`."""
    shares = [value for key, value in metrics.items() if SHARE_RIGHT.fullmatch(key) and value is not None]
    return stop_at is not None and bool(shares) and min(shares) >= stop_at


def evaluate_sets(
    backend: Backend[Any],
    prepared: Prepared,
    folder: Path,
    step: int,
    prompts: int | None = None,
    sums: Sums | None = None,
) -> dict[str, float]:
    """Evaluate every set of `data.eval` under the current weights, record its rows in a run's folder, and return the
    metrics.

    These are avg@k for k samples, pass@k for powers of two up to k, mean length and score; for pairs the ranking
    accuracy and margin; for single responses of the data the mean negative log-prob of a token (nats). At most
    `prompts` of each set are used. `step` is the seed of the stages' random numbers, and `sums` collects their counts.
    """
    config, metrics = prepared.config, dict[str, float]()
    for name in config.data.evaluation_sources:
        table = backend.read(HeldOut(name, prompts=prompts))
        for stage in prepared.evaluation.stages:
            table = backend.run(stage, table, step, Sums() if sums is None else sums)
        index, samples, k = backend.index(table), config.evaluation.samples, 1
        if "correct" in index:
            metrics[f"eval/{name}/avg@{samples}"] = float(avg_at_k(index["correct"], index["group"]))
            while k <= samples:
                metrics[f"eval/{name}/pass@{k}"] = float(pass_at_k(index["correct"], index["group"], k=k))
                k *= 2
            metrics[f"eval/{name}/length_mean"] = float(index["action_tokens"].double().mean())
            metrics[f"eval/{name}/score_mean"] = float(index["score"].double().mean())
        elif "response_log_prob" in index:
            tokens = index["action_tokens"].sum().clamp(min=1)
            metrics[f"eval/{name}/loss"] = float(-index["response_log_prob"].sum() / tokens)
        else:
            scores = index["score" if "score" in index else "cost"].double()
            margin = scores[index["sample"] == 0] - scores[index["sample"] == 1]
            metrics[f"eval/{name}/pair_accuracy"] = float((margin > 0).double().mean())
            metrics[f"eval/{name}/margin"] = float(margin.mean())
        backend.record(rollout_path(folder, step, name), table, table)
    return metrics


class RunScores:
    """The evaluations of a training run: whether its target is reached, and the best step."""

    def __init__(self, prepared: Prepared, folder: Path, checkpoints: Checkpoints, world: World) -> None:
        self.prepared, self.folder, self.checkpoints, self.world = prepared, folder, checkpoints, world
        self.settings = prepared.config.evaluation
        self.are_enough = False
        """True if the last evaluation has reached `evaluation.stop_at`."""
        self.best_of_step: tuple[str, float] | None = None
        """The metric `evaluation.best` with its value, if the last step has the highest so far."""

    def begin(self, last: Mapping[str, Any], backend: Backend[Any], step: int) -> StepMetrics:
        """Evaluate before the first step, and return the metrics; `last` is the last line of metrics."""
        # A resumed run that had reached its target is complete.
        self.are_enough = last["step"] == step and good_enough(last, self.settings.stop_at)
        # A run that was stopped in its first step already has the line of step 0 when it resumes.
        if step > 0 or last["step"] >= 0 or not self.settings.every:
            return {}
        if self.settings.before_first_step:
            metrics = self.measure(backend, 0)
            return {"step": 0, **metrics} if metrics else {}
        # One prompt of every set, so that an error ends the run now and not at the first evaluation.
        evaluate_sets(backend, self.prepared, self.folder, 0, prompts=1)
        for name in self.prepared.config.data.evaluation_sources if self.world.first else ():
            path = rollout_path(self.folder, 0, name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {}

    def measure(self, backend: Backend[Any], step: int) -> StepMetrics:
        """Return the metrics of all sets after a step."""
        measured = evaluate_sets(backend, self.prepared, self.folder, step)
        self.are_enough = good_enough(measured, self.settings.stop_at)
        if name := self.settings.best:
            before = self._best_before(name)
            if step > 0 and (before is None or measured[name] > before):
                self.best_of_step = (name, measured[name])
        return {**measured}

    def forget(self) -> None:
        """Forget the last evaluation: its step is made again."""
        self.are_enough, self.best_of_step = False, None

    def _best_before(self, name: str) -> float | None:
        """Return the highest value of a metric among written checkpoints; all ranks get the first rank's value."""
        if self.world.first:
            self.checkpoints.wait()
        best = best_checkpoint(self.folder) if self.world.first else None
        value: float | None = best.value if best and best.metric == name else None
        return self.world.share("best value", value)


def evaluate_model(config: Config) -> dict[str, float]:
    """Return the metrics of every set under `data.eval` for the untrained model, as `braid eval` prints them."""
    config = with_fetched(config)
    if not MODES[config.runtime].chained:
        return evaluated(config, World())
    metrics: dict[str, float] = in_ranks(config, "braidrl.runtimes.evaluation:evaluate_rank", {})
    return metrics


def evaluate_rank(world: World, task: dict[str, Any]) -> dict[str, float]:
    return evaluated(parse_config(task["config"]), world)


def evaluated(config: Config, world: World) -> dict[str, float]:
    """Evaluate in one process, or as one rank; return the metrics of every set."""
    progress = Progress(shown=world.first)
    prepared, chosen = prepared_to_fit(config, world, train=False)
    config = prepared.config
    check_sets(config)
    for line in [*chosen, *without_effect(config)]:
        progress.print(line)
    set_up_torch(config)
    new_folder = None
    if world.first:
        check_output(config)
        new_folder = unused_folder(config.model_copy(update={"flow": "eval"}))
        write_config(new_folder, config)
    folder = Path(world.share("folder", str(new_folder)))
    progress.print(f"responses are kept in {folder / 'rollouts'}")
    backend = start_backend(prepared, progress, world=world)
    sums = Sums()
    try:
        metrics = evaluate_sets(backend, prepared, folder, 0, sums=sums)
    finally:
        backend.close()
    if beyond := failures_beyond(sums, config.reward.max_failed_fraction):
        raise FailedStep(f"evaluation: {beyond}; the rows are in {folder}")
    return metrics

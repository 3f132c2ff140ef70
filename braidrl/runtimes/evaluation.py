"""Evaluation: a second flow (generate, verify) with its own sampling and random numbers, pinned to one version of the
weights.
"""

import re
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
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.row_store import HeldOut
from braidrl.runtimes.saving.folders import check_output, unused_folder, write_config
from braidrl.runtimes.sizing import prepared_to_fit
from braidrl.runtimes.spmd.launch import in_ranks
from braidrl.runtimes.start import start_backend
from braidrl.runtimes.step_metrics import failures_beyond

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

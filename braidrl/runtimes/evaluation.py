"""Evaluation: a second flow (generate, verify) with its own sampling and random numbers, on one version of the weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from braidrl.algorithms.metrics import avg_at_k, pass_at_k
from braidrl.config import Config, EvaluationConfig
from braidrl.data.rows import Rows
from braidrl.flow import Flow, Kind
from braidrl.flow.stages import make_stage
from braidrl.observe.metrics import Sums
from braidrl.runtimes.backend import Backend, T
from braidrl.runtimes.saving.row_store import HeldOut

SHARE_RIGHT = re.compile(r"eval/.+/(avg@\d+|pair_accuracy)")


def evaluation_flow(config: Config, flow: Flow) -> Flow:
    """Generation by the flow's first generating role at the evaluation's settings, checked or played as in the flow.

    Where the flow trains a model that only scores, it scores held-out pairs instead.
    """
    if flow.trains_on_pairs and flow.roles[0] in flow.scalar_roles:
        joined = make_stage("data.join_response", None, id="evaluation.join_response")
        return Flow("evaluation", [joined, make_stage("score", flow.roles[0], id="evaluation.score")])
    role = next((s.role for s in flow.stages if s.kind is Kind.GENERATE), flow.roles[0])
    checks = next((s.params for s in flow.stages if s.type == "verify"), {})
    scores = {"correct_score": checks.get("correct_score", 1.0), "wrong_score": checks.get("wrong_score", 0.0)}
    settings = config.evaluation
    sampling = {
        "temperature": settings.temperature or 1.0, "greedy": settings.temperature == 0,
        "top_p": settings.top_p, "top_k": settings.top_k, "purpose": "evaluation",
    }  # fmt: skip
    environment = next((s.params.get("environment") for s in flow.stages if s.kind is Kind.GENERATE), None)
    generate = make_stage("generate", role, {**sampling, "environment": environment}, id="evaluation.generate")
    if environment is not None:
        return Flow("evaluation", [generate])
    return Flow("evaluation", [generate, make_stage("verify", "reward", scores, id="evaluation.verify")])


def evaluation_metrics(name: str, index: Rows, samples: int) -> dict[str, float]:
    """avg@k for k = `samples`, pass@k for the powers of two up to it, mean length and score; for pairs, how many are told apart."""
    if "correct" not in index:
        return pair_metrics(name, index)
    correct, group = index["correct"], index["group"]
    metrics = {f"eval/{name}/avg@{samples}": float(avg_at_k(correct, group))}
    k = 1
    while k <= samples:
        metrics[f"eval/{name}/pass@{k}"] = float(pass_at_k(correct, group, k=k))
        k *= 2
    metrics[f"eval/{name}/length_mean"] = float(index["action_tokens"].double().mean())
    metrics[f"eval/{name}/score_mean"] = float(index["score"].double().mean())
    return metrics


def good_enough(metrics: Mapping[str, float | int | None], stop_at: float | None) -> bool:
    """True where an evaluation is among the metrics, and the share of right answers of every set is at least `stop_at`."""
    shares = [value for key, value in metrics.items() if SHARE_RIGHT.fullmatch(key) and value is not None]
    return stop_at is not None and bool(shares) and min(shares) >= stop_at


def pair_metrics(name: str, index: Rows) -> dict[str, float]:
    """The share of pairs whose chosen response (sample 0) has the higher score, and by how much on average."""
    scores = index["score" if "score" in index else "cost"].double()
    margin = scores[index["sample"] == 0] - scores[index["sample"] == 1]
    return {
        f"eval/{name}/pair_accuracy": float((margin > 0).double().mean()),
        f"eval/{name}/margin": float(margin.mean()),
    }


def evaluated_sets(
    backend: Backend[T], flow: Flow, names: Iterable[str], settings: EvaluationConfig, step: int
) -> Iterator[tuple[str, T, dict[str, float]]]:
    """Each set's name, its rows and its metrics under the current weights."""
    for name in names:
        table = backend.read(HeldOut(name))
        for stage in flow.stages:
            table = backend.run(stage, table, step, Sums())
        yield name, table, evaluation_metrics(name, backend.index(table), settings.samples)

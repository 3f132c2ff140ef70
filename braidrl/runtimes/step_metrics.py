"""One iteration as the flat dictionary of `metrics.jsonl`.

`score`, `response`, `groups` and `tokens/generated` describe the rows that selection saw, up to the batch's last group;
`reward`, `loss`, `actor` and `tokens/trained` describe the batch that was trained on.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms.policy_metrics import effective_sample_share, explained_variance, group_shares, mean_where
from braidrl.data.rows import FinishReason, Rows
from braidrl.errors import FailedStep, UserError
from braidrl.flow import Flow, Kind, Scope
from braidrl.flow.compute import of_namespace
from braidrl.flow.flow import is_optimized, policies_of
from braidrl.observe.metrics import FAILURE, REQUIRED_KEYS, Sums
from braidrl.runtimes.interfaces import IterationResult
from braidrl.runtimes.memory.budget import in_units
from braidrl.training.objective import trained_rows

StepMetrics = dict[str, float | int | None]

# Derived metric: its function, its inputs, and the inputs that it replaces.
DERIVED: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], tuple[str, ...]]] = {
    "explained_variance": (
        explained_variance,
        ("error", "error_squared", "returns", "returns_squared"),
        ("error", "error_squared", "returns_squared"),
    ),
    "effective_sample_size": (effective_sample_share, ("ratio", "ratio_squared"), ("ratio_squared",)),
    "clip_high_probability": (mean_where, ("clip_high_probability", "clip_fraction_high"), ()),
}

FAILED = ("reward/failed_fraction", "environment/failed_fraction")
"""Shares of a step's rows with failed checks or trajectories; reported only in steps with failures."""
GAP = "train/rollout_log_prob_gap"
"""Mean difference between the log-probs of engine and trainer over a batch's tokens."""
GAP_JUMP = 20.0
"""A gap this many times the largest earlier one is a jump."""
GAP_FLOOR = 0.01
"""In nats per token; a gap below this never ends a run."""
STEPS_WITHOUT_SIGNAL = 3
"""Steps after which a run that learns nothing is told why."""
NO_SIGNAL = {
    "groups/no_signal_fraction": (
        "the rewards of every group's responses were equal, so that no group taught anything: the prompts are too "
        "hard or too easy, the verifier does not find the answers (see the responses in rollouts/ or `braid "
        "report`), rollout.samples_per_prompt is small, or rollout.temperature is 0"
    ),
    "response/truncated_fraction": (
        "every response was cut: rollout.max_response_tokens is too small, or the model writes no end token, as a "
        "base model does without a chat template; name what ends a response by rollout.stop"
    ),
}
"""Shares of a step that are 1 if nothing can be learned from it, with the likely causes."""


def step_metrics(
    flow: Flow, result: IterationResult[Any], step: int, version: int, seconds: float
) -> dict[str, float | int | None]:
    """Return the metrics of a step, always with `REQUIRED_KEYS`; a metric that the flow lacks is None."""
    metrics: dict[str, float | int | None] = dict.fromkeys(REQUIRED_KEYS)
    metrics |= training_metrics(result)
    metrics |= sampled_metrics(result.generated, result.batch)
    metrics |= {f"groups/dropped/{reason.replace(' ', '_')}": count for reason, count in result.dropped.items()}
    # Times measured by workers; the controller's own clock for work in this process.
    measured = {name: total for name, (total, _) in result.sums.pairs().items()}
    metrics |= {f"time/{s.name}": measured.get(f"time/{s.name}", result.seconds[s.name]) for s in flow.stages}
    batch = result.batch
    metrics["step"], metrics["version"], metrics["time/step"] = step, version, seconds
    metrics["reward/mean"] = mean_of(batch, "reward")
    for role in dict.fromkeys(role for stage in flow.stages for role in policies_of(stage)[1:]):
        metrics |= policy_metrics(role, result.generated, batch)
        metrics["tokens/generated"] = (metrics["tokens/generated"] or 0) + int(
            of_namespace(result.generated, role)["action_tokens"].sum()
        )
    # Scores computed after the selection exist only for the batch.
    metrics["score/mean"] = mean_of(result.generated if "score" in result.generated else batch, "score")
    if "cost" in batch:
        metrics["cost/mean"] = mean_of(batch, "cost")
    spaces = dict.fromkeys(stage.params.get("of") for stage in flow.stages if is_optimized(stage)) or {None: None}
    trained = [of_namespace(batch, space) for space in spaces] if "length" in batch else []
    metrics["tokens/trained"] = sum(int(trained_rows(rows)["length"].sum()) for rows in trained)
    metrics["throughput/tokens_per_second"] = (int(batch["length"].sum()) if "length" in batch else 0) / seconds
    if "version" in batch and len(batch):
        metrics["staleness/max"] = int(version - batch["version"].min())
        metrics["staleness/on_policy_share"] = float((batch["version"] == version).double().mean())
    if not any(stage.kind is Kind.GENERATE for stage in flow.stages):
        # Responses from the data have no sampling policy to compare with.
        metrics["actor/kl_old"] = None
    # NaN means that nothing was counted.
    return {k: None if isinstance(value, float) and math.isnan(value) else value for k, value in metrics.items()}


def policy_metrics(role: str, generated: Rows, batch: Rows) -> dict[str, float | int | None]:
    """Return the metrics of a role that plays in other roles' episodes, over the rows in which it has acted."""
    metrics: dict[str, float | int | None] = {}
    for name, index, column in (
        ("score_mean", generated, "score"),
        ("reward_mean", batch, "reward"),
        ("length_mean", generated, "action_tokens"),
    ):
        acted = of_namespace(index, role)
        metrics[f"{role}/{name}"] = mean_of(acted.take(acted["action_tokens"] > 0), column)
    return metrics


def training_metrics(result: IterationResult[Any]) -> dict[str, float]:
    """Return the means counted by the updates, under their roles."""
    metrics, gaps = dict[str, float](), list[float]()
    for name, value in result.sums.means().items():
        if name.startswith(FAILURE) or (name in FAILED and not value):
            continue
        if name.endswith("/rollout_log_prob_gap"):
            gaps += [] if math.isnan(value) else [value]
        elif "/failures/" in name or name.endswith("/skipped_updates"):
            metrics[name] = result.sums.pairs()[name][0]
        else:
            metrics[name] = value
    if gaps:
        # Of several trained roles the largest.
        metrics[GAP] = max(gaps)
    for role in dict.fromkeys(name.partition("/")[0] for name in metrics):
        parts = {name.removeprefix(f"{role}/"): value for name, value in metrics.items() if name.startswith(f"{role}/")}
        for name, (function, arguments, spent) in DERIVED.items():
            if all(argument in parts for argument in arguments):
                metrics[f"{role}/{name}"] = float(function(*(torch.tensor(parts[a]).double() for a in arguments)))
                for moment in spent:
                    del metrics[f"{role}/{moment}"]
    return metrics


def sampled_metrics(generated: Rows, batch: Rows) -> dict[str, float | int | None]:
    """Return metrics of the responses, and the shares of groups with a signal; of the batch if rewards come later."""
    metrics = dict[str, float | int | None]()
    if "finish_reason" in generated:
        lengths, reasons = generated["action_tokens"].double(), generated["finish_reason"]
        metrics = {
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated_fraction": float((reasons == FinishReason.LENGTH).double().mean()),
            "response/repeated_fraction": float((reasons == FinishReason.REPEAT).double().mean()),
            "response/failed_fraction": float((reasons == FinishReason.ERROR).double().mean()),
            "tokens/generated": int(lengths.sum()),
            "rows/generated": len(generated),
            "response/reflections": mean_of(generated, "reflections"),
        }
    index = generated if "reward" in generated else batch
    if "reward" in index and len(index):
        correct = index["correct"] if "correct" in index else index["reward"] * 0
        shares = group_shares(correct, index["reward"], index["group"])
        reported = shares if "correct" in index else {"no_signal_fraction": shares["no_signal_fraction"]}
        metrics |= {f"groups/{name}": float(value) for name, value in reported.items()}
    return metrics


def mean_of(index: Rows, name: str) -> float | None:
    return float(index[name].double().mean()) if name in index and len(index) else None


def summary(metrics: Mapping[str, float | int | None]) -> str:
    """Return the terminal line of a step."""
    parts = [f"step {metrics['step']}"]
    # Of several trained roles the actor; a reward model is trained without one.
    trained = [
        name.removeprefix("loss/") for name, value in metrics.items() if name.startswith("loss/") and value is not None
    ]
    role = "actor" if "actor" in trained or not trained else trained[0]
    for label, name, form in (
        ("loss", f"loss/{role}", "{:.4f}"),
        ("accuracy", f"{role}/accuracy", "{:.3f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("score", "score/mean", "{:.3f}"),
        ("length", "response/length_mean", "{:.0f}"),
        ("entropy", f"{role}/entropy", "{:.3f}"),
        ("grad norm", f"{role}/grad_norm", "{:.3f}"),
        ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
        ("s", "time/step", "{:.1f}"),
        ("engines idle", "streaming/idle/actor.generate", "{:.0%}"),
    ):
        value = metrics.get(name)
        if value is not None:
            parts.append(f"{label} {form.format(value)}")
    for label, prefix in (("MFU", "utilisation/operations/"), ("bandwidth", "utilisation/bandwidth/")):
        if values := [value for name, value in metrics.items() if name.startswith(prefix) and value is not None]:
            parts.append(f"{label} {max(values):.0%}")
    if taken := [value for name, value in metrics.items() if name.startswith("memory/") and value is not None]:
        parts.append(f"memory {in_units(int(max(taken)))}")
    updates = sum(value for name, value in metrics.items() if name.endswith("/update_seconds") and value is not None)
    parts += [f"weights {updates:.2f} s"] if updates >= 0.005 else []
    shown = [name for name in metrics if "/avg@" in name or name.endswith(("/pair_accuracy", "/multiplier"))]
    parts += [f"{name} {value:.3f}" for name in shown if (value := metrics[name]) is not None]
    return "  ".join(parts)


class GapWatch:
    """Ends a run whose engine and trainer diverge: missing weight updates, or different numerics."""

    def __init__(self, limit: float) -> None:
        """Start with a `limit` in nats per token."""
        self._limit = limit
        self._largest: float | None = None

    def check(self, metrics: Mapping[str, float | int | None]) -> None:
        """Raise UserError if the gap of a step is over the limit or has jumped."""
        gap = metrics.get(GAP)
        if gap is None:
            return
        before, self._largest = self._largest, max(gap, self._largest or 0.0)
        jumped = before is not None and gap > max(GAP_FLOOR, GAP_JUMP * before)
        if gap > self._limit or jumped:
            earlier = f", where it was {before:.2g} at most before" if before is not None else ""
            raise UserError(
                f"step {metrics['step']}: engine and trainer give the same tokens log-probs that are {gap:.2g} nats "
                f"apart on average{earlier}. The engine does not have the trainer's weights, or computes otherwise: "
                "the step is not saved. Go on from the last checkpoint, or with a higher rollout.max_log_prob_gap if "
                "both are meant to differ"
            )


class LearningWatch:
    """Prints once why a run does not learn: several steps in a row had no signal, or all responses were truncated."""

    def __init__(self, flow: Flow, say: Callable[[str], object]) -> None:
        """Start; `say` prints a line.

        Equal rewards are not a fault if advantages do not compare a group's rows.
        """
        compares = any(s.scope is Scope.GROUP and s.type.startswith("advantage.") for s in flow.stages)
        self._say = say
        self._steps = {name: 0 for name in NO_SIGNAL if compares or not name.startswith("groups/")}

    def note(self, metrics: Mapping[str, float | int | None]) -> None:
        """Record a step's metrics, and print a line with the likely causes after several such steps in a row."""
        for name in self._steps:
            self._steps[name] = self._steps[name] + 1 if metrics.get(name) == 1.0 else 0
            if self._steps[name] == STEPS_WITHOUT_SIGNAL:
                self._say(f"{name} was 1 for {STEPS_WITHOUT_SIGNAL} steps: {NO_SIGNAL[name]}")


class FailureWatch:
    """Ends a run whose checks or trajectories fail, which would otherwise learn from false zero rewards."""

    def __init__(self, most: float, steps: int, folder: Path) -> None:
        """Start; `steps` failing steps in a row, each with more than the share `most`, end the run; 0 never ends it."""
        self._most, self._limit, self._folder = most, steps, folder
        self._steps, self._sums = 0, Sums()

    def check(self, step: int, sums: Sums) -> None:
        """Raise FailedStep with the most frequent reason if too many rows failed in too many steps in a row."""
        if not failures_beyond(sums, self._most):
            self._steps, self._sums = 0, Sums()
            return
        self._steps += 1
        self._sums.merge(sums)
        if self._steps == self._limit:
            many = f" of {self._steps} steps in a row" if self._steps > 1 else ""
            raise FailedStep(
                f"step {step}: {failures_beyond(self._sums, self._most, many)}. The step is saved: fix the cause, and "
                f"continue with `braid train --resume {self._folder}`; reward.max_failed_fraction=1 goes on regardless"
            )


def failures_beyond(sums: Sums, most: float, of: str = "") -> str:
    """Describe the most frequent failure if more than the share `most` of checks or trajectories failed; else empty."""
    for name, what in zip(FAILED, ("checks", "trajectories"), strict=True):
        failed, total = sums.pairs().get(name, (0.0, 0.0))
        if total and failed / total > most:
            count = f"every one of {total:,.0f}" if failed == total else f"{failed:,.0f} of {total:,.0f}"
            pairs = sums.pairs()
            messages = [name for name in pairs if name.startswith(FAILURE)]
            often = max(messages, key=lambda message: pairs[message][1], default="no process said why")
            return f"{count} {what}{of} failed; most often: {often.removeprefix(FAILURE)}"
    return ""

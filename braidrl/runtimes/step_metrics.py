"""One iteration as the flat dictionary that `metrics.jsonl` holds.

`score`, `response`, `groups` and `tokens/generated` speak of every row that was generated, before selection; `reward`, `loss`,
`actor` and `tokens/trained` of the batch that was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from braidrl.data.rows import FinishReason, Rows
from braidrl.flow import Flow
from braidrl.models.objective import trained
from braidrl.observe.metrics import REQUIRED_KEYS
from braidrl.runtimes.iteration import IterationResult


def step_metrics(
    flow: Flow, result: IterationResult[Any], step: int, version: int, seconds: float
) -> dict[str, float | int | None]:
    """Everything that DESIGN.md section 7 lists; None for what this flow does not have, such as the reward of `sft`."""
    metrics: dict[str, float | int | None] = dict.fromkeys(REQUIRED_KEYS)
    metrics |= training_metrics(result)
    metrics |= generated_metrics(result.generated)
    metrics |= {f"groups/dropped/{reason.replace(' ', '_')}": count for reason, count in result.dropped.items()}
    # What workers measured counts; the walk's own clock where the work was done in this process.
    measured = {name: total for name, (total, _) in result.sums.pairs().items()}
    metrics |= {f"time/{s.name}": measured.get(f"time/{s.name}", result.seconds[s.name]) for s in flow.stages}
    batch = result.batch
    metrics["step"], metrics["version"], metrics["time/step"] = step, version, seconds
    metrics["reward/mean"] = mean_of(batch, "reward")
    metrics["tokens/trained"] = total_of(trained(batch), "length") if "length" in batch else 0
    metrics["throughput/tokens_per_second"] = total_of(batch, "length") / seconds
    metrics["staleness/max"] = int(version - batch["version"].min()) if "version" in batch and len(batch) else 0
    return {name: clean(value) for name, value in metrics.items()}


def training_metrics(result: IterationResult[Any]) -> dict[str, float]:
    """Means of what the updates counted; per-token monitors of the policy come under `actor/`."""
    metrics = {}
    for name, value in result.sums.means().items():
        if name == "rollout_log_prob_gap":
            metrics["train/rollout_log_prob_gap"] = value
        elif name.startswith("reward/failures/"):
            metrics[name] = result.sums.pairs()[name][0]
        else:
            metrics[name if "/" in name else f"actor/{name}"] = value
    return metrics


def generated_metrics(index: Rows) -> dict[str, float | int | None]:
    """What the responses look like, and how many groups can teach anything."""
    if "finish_reason" not in index:
        return {"tokens/generated": 0}
    lengths = index["action_tokens"].double()
    found: dict[str, float | int | None] = {
        "score/mean": mean_of(index, "score"),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": share(index["finish_reason"] == FinishReason.LENGTH),
        "tokens/generated": int(lengths.sum()),
        "rows/generated": len(index),
    }
    if "correct" in index:
        low, high = group_extremes(index["correct"], index["group"])
        found["groups/all_correct_fraction"] = share(low > 0.5)
        found["groups/all_wrong_fraction"] = share(high < 0.5)
    return found


def group_extremes(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each group, (groups,) each."""
    _, place = group.unique(return_inverse=True)
    size = int(place.max()) + 1
    low = torch.full((size,), math.inf).scatter_reduce(0, place, values.float(), "amin")
    high = torch.full((size,), -math.inf).scatter_reduce(0, place, values.float(), "amax")
    return low, high


def mean_of(index: Rows, name: str) -> float | None:
    return float(index[name].double().mean()) if name in index and len(index) else None


def total_of(index: Rows, name: str) -> int:
    return int(index[name].sum()) if name in index else 0


def share(mask: Tensor) -> float:
    return float(mask.double().mean()) if len(mask) else 0.0


def clean(value: float | int | None) -> float | int | None:
    """None in place of NaN: nothing was counted."""
    return None if isinstance(value, float) and math.isnan(value) else value


def summary(metrics: Mapping[str, float | int | None]) -> str:
    """The line that the terminal shows for a step."""
    parts = [f"step {metrics['step']}"]
    for label, name, form in (
        ("loss", "loss/actor", "{:.4f}"), ("reward", "reward/mean", "{:.3f}"), ("score", "score/mean", "{:.3f}"),
        ("length", "response/length_mean", "{:.0f}"), ("entropy", "actor/entropy", "{:.3f}"),
        ("grad norm", "actor/grad_norm", "{:.3f}"), ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
        ("s", "time/step", "{:.1f}"),
    ):  # fmt: skip
        value = metrics.get(name)
        if value is not None:
            parts.append(f"{label} {form.format(value)}")
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if "/avg@" in name and value is not None]
    return "  ".join(parts)

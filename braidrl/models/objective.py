"""What a train stage minimises: a policy loss, its correction, a KL term and an entropy bonus, as sums with named denominators.

    Σ_t w_t · (c_t · loss_t + kl_coef · kl_t − entropy_coef · H_t)         w: aggregation, c: correction
    ──────────────────────────────────────────────────────────────
                 global count of tokens, rows or groups                    divided at `step`, not here

All tensors are flat over the A action tokens of a micro-batch; `offsets` (B + 1,) says which row each belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms import registry
from braidrl.algorithms.aggregation import denominator, weighted_sum
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Entry
from braidrl.data.rows import Rows
from braidrl.flow.lookup import entry_of

PER_ROW = ("group", "sample", "group_tokens")


@dataclass(frozen=True)
class Objective:
    """A train stage's parameters, resolved. Made by `Objective.of(stage.params)`."""

    loss: Entry
    settings: Mapping[str, Any]
    aggregate: str
    aggregate_settings: Mapping[str, Any] = field(default_factory=dict)
    old: str = "self"
    kl: Mapping[str, Any] | None = None
    entropy_coef: float = 0.0
    correction: Mapping[str, Any] | None = None

    @staticmethod
    def of(params: Mapping[str, Any]) -> Objective:
        """From the parameters of an `update` stage; `aggregate` is a name or a name with settings."""
        loss = dict(params["loss"])
        aggregate = params.get("aggregate", "token-mean")
        aggregate = {"name": aggregate} if isinstance(aggregate, str) else dict(aggregate)
        return Objective(
            entry_of(registry.losses, loss["name"]),
            {name: value for name, value in loss.items() if name != "name"},
            aggregate.pop("name"),
            aggregate,
            params.get("old", "self"),
            params.get("kl"),
            params.get("entropy_coef", 0.0),
            params.get("correction"),
        )

    @property
    def denominator(self) -> str:
        """Which global count the sums are divided by: tokens, rows or groups."""
        return denominator[self.aggregate]

    def sums(
        self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Loss sums by denominator (with gradient), and per-token metrics (A,) without.

        `predicted` holds what this forward pass computed: `log_probs` and `entropy`, or `values`.
        """
        columns = self._columns(rows, offsets, predicted)
        per_token, metrics = self.loss.function(*self._arguments(columns), **self.settings)
        per_token, metrics = self._corrected(per_token, metrics, columns)
        if self.kl is not None:
            estimator = entry_of(registry.divergences, self.kl["name"]).function
            divergence = estimator(columns["log_probs"], columns["ref_log_probs"])
            per_token = per_token + self.kl["coef"] * divergence
            metrics["kl_reference"] = divergence.detach()
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * columns["entropy"]
        weights = self._weights(columns)
        metrics |= self._monitors(columns)
        return {self.denominator: weighted_sum(per_token, weights)}, metrics

    def _columns(self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        columns = {**_flat(rows, offsets), "offsets": offsets, **predicted}
        if "log_probs" in columns:
            if self.old == "self":
                columns["old_log_probs"] = columns["log_probs"].detach()
            elif self.old == "rollout":
                columns["old_log_probs"] = columns["rollout_log_probs"]
        return columns

    def _arguments(self, columns: Mapping[str, Tensor]) -> list[Tensor | None]:
        return [columns[name] for name in self.loss.reads] + [columns.get(name) for name in self.loss.optional]

    def _corrected(
        self, per_token: Tensor, metrics: dict[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.correction is None:
            return per_token, dict(metrics)
        settings = {name: value for name, value in self.correction.items() if name != "name"}
        entry = entry_of(registry.corrections, self.correction["name"])
        weights, more = entry.function(
            columns["old_log_probs"], columns["rollout_log_probs"], columns["offsets"], **settings
        )
        return per_token * weights, {**metrics, **more}

    def _weights(self, columns: Mapping[str, Tensor]) -> Tensor:
        entry = entry_of(registry.aggregations, self.aggregate)
        return entry.function(*[columns[name] for name in entry.reads], **self.aggregate_settings)

    def _monitors(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What every policy update reports, whatever its loss."""
        if "log_probs" not in columns:
            return {}
        current = columns["log_probs"].detach()
        found = {"entropy": columns["entropy"].detach(), "log_prob_mean": current}
        if "old_log_probs" in columns:
            found["kl_old"] = columns["old_log_probs"] - current
            if "rollout_log_probs" in columns:
                found["rollout_log_prob_gap"] = (columns["old_log_probs"] - columns["rollout_log_probs"]).abs()
        return found


def _flat(rows: Rows, offsets: Tensor) -> dict[str, Tensor]:
    """Columns on action tokens as flat values, a row's `advantage` spread over its tokens, a few numbers per row."""
    device = offsets.device
    per_token = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "returns", "old_values")
    columns = {name: rows[name].values.to(device) for name in per_token if name in rows}
    columns |= {name: rows[name].to(device) for name in PER_ROW if name in rows}
    if "values" in rows:
        columns["old_values"] = rows["values"].values.to(device)
    if "advantages" not in columns and "advantage" in rows:
        columns["advantages"] = Ragged(torch.empty(int(offsets[-1]), device=device), offsets).spread(
            rows["advantage"].to(device)
        )
    return columns


def denominators(index: Rows) -> dict[str, float]:
    """Global counts of an optimizer step's rows after masking: what its loss sums are divided by."""
    used = trained(index)
    return {
        "tokens": float(used["action_tokens"].sum()),
        "rows": float(len(used)),
        "groups": float(len(used["group"].unique())),
    }


def trained(rows: Rows) -> Rows:
    """The rows that take part in the loss: with at least one action, and not masked out by `loss_mask`."""
    taken = rows["action_tokens"] > 0
    if "loss_mask" in rows:
        taken = taken & (rows["loss_mask"] > 0)
    return rows if bool(taken.all()) else rows.take(taken)

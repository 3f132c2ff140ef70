"""The objective of a train stage: a policy loss, its correction, a KL term and an entropy bonus, as sums with named denominators.

    Σ_t w_t · (c_t · loss_t + kl_coef · kl_t − entropy_coef · H_t)         w: aggregation, c: correction
    ──────────────────────────────────────────────────────────────
                 global count of tokens, rows or groups                    divided at `optim_step`, not here

Auxiliary likelihood terms have sums and denominators of their own. All tensors are flat over the A action tokens of a micro-batch;
`offsets` (B + 1,) says which row each belongs to.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms import registry
from braidrl.algorithms.aggregation import weighted_sum
from braidrl.algorithms.kl import estimate
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Entry
from braidrl.data.rows import FinishReason, Rows, named_rows
from braidrl.flow.lookup import entry_of
from braidrl.flow.signatures import columns_in_training
from braidrl.training.likelihood import Likelihood, likelihood_counts, likelihoods

NAMES_A_TOKEN = "at response token"
"""What a message says that knows where a number is not finite."""


@dataclass(frozen=True)
class Objective:
    """A train stage's parameters, resolved by `Objective.of`."""

    role: str
    loss: Entry
    settings: Mapping[str, Any]
    aggregate: str
    aggregate_settings: Mapping[str, Any] = field(default_factory=dict)
    old: str = "self"
    kl: Mapping[str, Any] | None = None
    entropy_coef: float = 0.0
    correction: Mapping[str, Any] | None = None
    auxiliary: tuple[Likelihood, ...] = ()

    @staticmethod
    def of(role: str, params: Mapping[str, Any]) -> "Objective":
        """Return what the parameters of a role's `update` stage stand for.

        Args:
            role: The role that is trained.
            params: As `Role.update` takes them: loss, aggregate, kl and so on, by name or with settings.

        Raises:
            UserError: A name that is not registered.
        """
        loss, aggregate = name_and_settings(params["loss"]), name_and_settings(params.get("aggregate", "token-mean"))
        kl, correction = (name_and_settings(params[key]) if key in params else None for key in ("kl", "correction"))
        return Objective(
            role, entry_of(registry.losses, loss.pop("name")), loss, aggregate.pop("name"), aggregate,
            params.get("old", "self"), kl, params.get("entropy_coef", 0.0), correction, likelihoods(params),
        )  # fmt: skip

    @property
    def denominator(self) -> str:
        """Return the global count that the sums are divided by: tokens, rows or groups."""
        return entry_of(registry.aggregations, self.aggregate).denominator

    @property
    def denominators(self) -> tuple[str, ...]:
        """Return all global counts that `optim_step` needs: this loss's and those of the auxiliary terms."""
        return (self.denominator, *(term.denominator for term in self.auxiliary))

    def select(self, rows: Rows) -> Rows:
        """Return the rows that take part in this loss."""
        return trained_rows(rows)

    def passes(self, rows: Rows) -> list[Rows]:
        """Return what goes through the model: the rows of this loss, and of each auxiliary term."""
        terms: tuple[Objective | Likelihood, ...] = (self, *self.auxiliary)
        return [term.select(rows) for term in terms] if len(rows) else []

    @property
    def whole_groups(self) -> bool:
        """Return True where the loss compares the rows of a group, which then share a micro-batch."""
        return self.loss.needs.whole_groups

    @property
    def needs_group_tokens(self) -> bool:
        """Return True if a row's loss depends on how many tokens its whole group has in the optimizer step."""
        return "group_tokens" in entry_of(registry.aggregations, self.aggregate).reads

    def sums(
        self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the loss sums and metrics of a micro-batch.

        Args:
            rows: Its rows.
            offsets: (B + 1,) int64, where each row's action tokens begin; on the CPU, so that no device is waited for.
            predicted: This forward pass's `log_probs` and `entropy` (A,), `values` (A,), or `scores` (B,).

        Returns:
            Loss sums by denominator, with gradient, and metrics per token (A,), detached.
        """
        if "scores" in predicted:
            offsets = torch.arange(len(offsets), device=offsets.device)
        device = next(iter(predicted.values())).device
        look = Lookup(self, rows, offsets, predicted, device)
        per_token, metrics = self.loss.function(*look.arguments(self.loss), **self.settings)
        if self.whole_groups:
            # What is said of a pair counts once for each row, and not for each of its tokens.
            metrics = {name: Ragged(value, offsets.to(device)).row_means() for name, value in metrics.items()}
        metrics = {**self._monitors(look), **metrics}
        if self.correction is not None:
            settings = {name: value for name, value in self.correction.items() if name != "name"}
            entry = entry_of(registry.corrections, self.correction["name"])
            weights, more = entry.function(*look.arguments(entry), **settings)
            per_token, metrics = per_token * weights, {**metrics, **more}
        if self.kl is not None:
            entry = entry_of(registry.divergences, self.kl["name"])
            divergence = entry.function(*look.arguments(entry))
            per_token = per_token + self.kl["coef"] * divergence
            metrics["kl_loss"] = divergence.detach()
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * predicted["entropy"]
        entry = entry_of(registry.aggregations, self.aggregate)
        # The host knows how many tokens there are, and a device would have to be asked.
        weights = entry.function(*replace(look, device=offsets.device).arguments(entry), **self.aggregate_settings)
        return {self.denominator: weighted_sum(per_token, weights.to(device))}, metrics

    def _monitors(self, look: "Lookup") -> dict[str, Tensor]:
        if "log_probs" not in look.predicted:
            return {}
        current = look.predicted["log_probs"].detach()
        found = {"entropy": look.predicted["entropy"].detach(), "log_prob_mean": current}
        old = look.find("old_log_probs")
        if old is not None:
            found["kl_old"] = old - current
            rollout = look.find("rollout_log_probs")
            if rollout is not None:
                found["rollout_log_prob_gap"] = (old - rollout).abs()
        reference = look.find("ref_log_probs")
        if reference is not None:
            found |= {f"kl_reference_{name}": estimate(name, current, reference) for name in ("k1", "k2", "k3")}
        return found


@dataclass(frozen=True)
class Lookup:
    """Resolves a registered function's parameters: tensors of this forward pass, or columns of the rows."""

    objective: Objective
    rows: Rows
    offsets: Tensor
    predicted: Mapping[str, Tensor]
    device: torch.device
    """Where the arguments are wanted."""

    def arguments(self, entry: Entry) -> list[Tensor | None]:
        """Return the arguments in the order of the function's parameters. Raises KeyError for a required one that is missing."""
        found = [self.find(self._column(entry, name)) for name in (*entry.reads, *entry.optional)]
        for name, value in zip(entry.reads, found, strict=False):
            if value is None:
                raise KeyError(f"{entry.name} needs {self._column(entry, name)!r}, which the rows do not have")
        return found

    def _column(self, entry: Entry, parameter: str) -> str:
        return columns_in_training(self.objective.role, entry, (parameter,)).get(parameter, parameter)

    def find(self, name: str) -> Tensor | None:
        if name == "offsets":
            return self.offsets.to(self.device)
        if name in self.predicted:
            return self.predicted[name].to(self.device)
        if name == "old_log_probs" and self.objective.old == "self" and "log_probs" in self.predicted:
            return self.predicted["log_probs"].detach()
        if name == "old_log_probs" and self.objective.old == "rollout":
            name = "rollout_log_probs"
        return column_values(self.rows, name, self.offsets, self.device)


def name_and_settings(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a name alone, or a name with settings, as a new dict."""
    return {"name": value} if isinstance(value, str) else dict(value)


def column_values(rows: Rows, column: str, offsets: Tensor, device: torch.device) -> Tensor | None:
    """Return a column as losses take it: payload as flat values (A,), index columns as they are (B,); None where it is missing.

    An `advantage` per row is repeated over the row's action tokens as `advantages`.
    """
    if column == "advantages" and column not in rows and "advantage" in rows:
        per_row = rows["advantage"].to(offsets.device)
        return per_row.repeat_interleave(offsets.diff()).to(device)
    found = rows.get(column)
    if found is None:
        return None
    values: Tensor = found.values if isinstance(found, Ragged) else found
    return values.to(device)


def denominators(index: Rows) -> dict[str, float]:
    """Return the global counts of an optimizer step's rows, after masking, that its loss sums are divided by."""
    used = trained_rows(index)
    return {
        "tokens": float(used["action_tokens"].sum()),
        "rows": float(len(used)),
        "groups": float(len(used["group"].unique())),
        **likelihood_counts(index),
    }


@dataclass(frozen=True)
class UpdateCounts:
    """What an optimizer step has to know of all of its rows: the counts that loss sums are divided by, and in words which they are."""

    counts: Mapping[str, float]
    rows: str

    @staticmethod
    def of(index: Rows) -> "UpdateCounts":
        """Count the rows of an optimizer step, of which `index` has the index columns."""
        return UpdateCounts(denominators(index), named_rows(index.uids()))


def nonfinite_tokens(rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> str:
    """Return in words which tokens of a micro-batch have a prediction or a column that is not finite; its rows where none has.

    Args:
        rows: The micro-batch.
        offsets: (B + 1,) int64, where each row's action tokens begin.
        predicted: What the model said of them.
    """
    count, found = int(offsets[-1]), []
    columns = [name for name, column in rows.items() if isinstance(column, Tensor | Ragged)]
    known = {
        **predicted,
        **{name: column_values(rows, name, offsets, offsets.device) for name in (*columns, "advantages")},
    }
    for name, values in known.items():
        if values is None or not values.is_floating_point() or len(values) != count:
            continue
        for place in (~torch.isfinite(values.detach())).nonzero().flatten().tolist()[:1]:
            row = int(torch.searchsorted(offsets, torch.tensor(place, device=offsets.device), right=True)) - 1
            number = place - int(offsets[row])
            found.append(f"{name} is {values[place].item()} {NAMES_A_TOKEN} {number} of row {rows.uids()[row]}")
    return "; ".join(found) or f"the loss overflowed{named_rows(rows.uids())}"


def with_group_tokens(rows: Rows, index: Rows) -> Rows:
    """Return `rows` with the action tokens of each row's whole group after masking, int64; what `prompt-mean` divides by.

    `index` holds the index columns of all rows of the optimizer step, of which `rows` are some.
    """
    counted = (index["action_tokens"] * trained_mask(index)).tolist()
    tokens: Counter[int] = Counter()
    for group, count in zip(index["group"].tolist(), counted, strict=True):
        tokens[group] += count
    return rows.with_columns({"group_tokens": torch.tensor([tokens[group] for group in rows["group"].tolist()])})


def trained_rows(rows: Rows) -> Rows:
    """Return the rows that take part in the loss."""
    taken = trained_mask(rows)
    return rows if bool(taken.all()) else rows.take(taken)


def trained_mask(index: Rows) -> Tensor:
    """Mask the rows that have an action, are not masked out by `loss_mask` and did not fail, (B,) bool.

    What a trajectory scored before its environment failed says nothing of its actions.
    """
    taken: Tensor = index["action_tokens"] > 0
    if "loss_mask" in index:
        taken = taken & (index["loss_mask"] > 0)
    if "finish_reason" in index:
        taken = taken & (index["finish_reason"] != FinishReason.ERROR)
    return taken

"""The objective of a train stage: policy loss, correction, KL term and entropy bonus, as sums with named denominators.

    Σ_t w_t · (c_t · loss_t + kl_coef · kl_t − entropy_coef · H_t)         w: aggregation, c: correction
    ──────────────────────────────────────────────────────────────
                 global count of tokens, rows or groups                    divided at `optim_step`, not here

Auxiliary likelihood terms, supervised losses in the same optimizer step, have their own sums and denominators:

    policy sums / their count + ptx_coef · Σ −log π(text) / ptx tokens + positive_coef · Σ −log π(right answers) / their
    tokens + observation_coef · Σ −log π(observations) / their tokens

All tensors are flat over the A action tokens of a micro-batch;
`offsets` (B + 1,) delimits its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms import registry
from braidrl.algorithms.advantages import Groups
from braidrl.algorithms.kl import estimate
from braidrl.algorithms.ragged import Ragged, observation_mask
from braidrl.algorithms.registry import Entry
from braidrl.data.rows import IDENTITY, ROWS_SHOWN, FinishReason, Rows, named_rows
from braidrl.data.token_columns import of_all_tokens
from braidrl.data.vision import IMAGE_COLUMNS
from braidrl.errors import UserError
from braidrl.flow.signatures import CHOICES, called, columns_in_training, entry_of, form_of, log_probs_column

LossSums = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Loss sums by denominator, and metrics."""


@dataclass(frozen=True)
class Likelihood:
    """A term: `coefficient` times the mean of −log π over tokens.

    `ptx` covers attached texts, `positive` the actions of correct rows, and `observation` the environment's tokens
    after a row's first action.
    """

    name: str
    coefficient: float
    loss: Entry
    denominator: str
    """The global count that the sum is divided by: `ptx_tokens`, `positive_tokens` or `observation_tokens`."""
    entropy_coef: float = 0.0
    whole_groups: bool = False

    def select(self, rows: Rows) -> Rows:
        """Return the rows of this term.

        Pre-training texts become separate rows, in which every token but the first is predicted.
        """
        if self.name == "positive":
            return rows.take((rows["correct"] > 0) & (rows["action_tokens"] > 0)).without(of_all_tokens())
        rows = trained_rows(rows) if self.name == "observation" else rows
        columns: dict[str, Any] = {name: rows[name] for name in IDENTITY}
        if self.name == "observation":
            columns["tokens"], columns["sequence_lengths"] = rows["tokens"], rows["sequence_lengths"]
            mask: Ragged = rows["action_mask"]
            columns["action_mask"] = mask.with_values(observation_mask(mask, rows["sequence_lengths"]))
            columns["action_tokens"] = rows["observation_tokens"]
            columns |= {name: rows[name] for name in IMAGE_COLUMNS if name in rows}
        else:
            tokens: Ragged = rows["ptx_tokens"]
            first = torch.zeros(len(tokens.values), dtype=torch.bool)
            first[tokens.offsets[:-1][tokens.lengths > 0]] = True
            columns["tokens"], columns["action_mask"] = tokens, tokens.with_values(~first)
            columns["sequence_lengths"] = Ragged(tokens.lengths, torch.arange(len(tokens) + 1))
            columns["action_tokens"] = (tokens.lengths - 1).clamp(min=0)
        texts = Rows(columns)
        return texts.take(texts["action_tokens"] > 0)

    def sums(self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> LossSums:
        """Return the loss sum by its denominator, with gradient, and the loss per token, detached."""
        per_token, _ = self.loss.function(predicted["log_probs"])
        return {self.denominator: self.coefficient * per_token.sum()}, {f"{self.name}_loss": per_token.detach()}


ROUTER_LOSS = "router_loss"
"""Name of the weighted balance losses of a mixture's routers per action token, (A,)."""
NAMES_A_TOKEN = "at response token"
"""The words in a message that locates a non-finite number."""


@dataclass(frozen=True)
class Objective:
    """The resolved parameters of a train stage."""

    role: str
    loss: Entry
    settings: Mapping[str, Any]
    aggregation: Entry
    aggregation_settings: Mapping[str, Any]
    denominator: str
    """The global count that the sums are divided by: tokens, rows or groups."""
    whole_groups: bool
    """True if the loss compares rows of a group, which must then share a micro-batch."""
    old: str = "self"
    kl: tuple[Entry, Mapping[str, Any]] | None = None
    """A function and its settings, as in `correction`."""
    entropy_coef: float = 0.0
    correction: tuple[Entry, Mapping[str, Any]] | None = None
    auxiliary: tuple[Likelihood, ...] = ()
    name: str = "update"
    """The name in metrics and messages, which is that of its stage."""
    replays: bool = False
    """True if the update uses the experts that the engine chose."""
    namespace: str | None = None
    """The namespace of the trajectories that are trained on."""

    @staticmethod
    def of(role: str, params: Mapping[str, Any], name: str = "update") -> "Objective":
        """Resolve the parameters of an `update` stage, by name or with settings.

        Raises UserError for a name that is not registered.
        """
        chosen = dict[str, tuple[Entry, dict[str, Any]]]()
        for key, choice in {"aggregate": "token-mean", **params}.items():
            if key in CHOICES:
                settings = {"name": choice} if isinstance(choice, str) else dict(choice)
                chosen[key] = entry_of(CHOICES[key], settings.pop("name")), settings
        auxiliary = [
            Likelihood(name, coefficient, registry.losses[loss], f"{name}_tokens")
            for name, loss in (("ptx", "ptx"), ("positive", "sft"), ("observation", "sft"))
            if (coefficient := params.get(f"{name}_coef", 0.0))
        ]
        loss, aggregation = chosen["loss"], chosen["aggregate"]
        return Objective(
            role,
            *loss,
            *aggregation,
            aggregation[0].denominator,
            loss[0].needs.whole_groups,
            params.get("old", "self"),
            chosen.get("kl"),
            params.get("entropy_coef", 0.0),
            chosen.get("correction"),
            tuple(auxiliary),
            name,
            params.get("replay", "none") != "none",
            params.get("of"),
        )

    def numbered(self, number: int) -> "Objective":
        """Return the objective with separate denominators if it is not the first (0) of an optimizer step."""
        if not number:
            return self
        terms = tuple(replace(term, denominator=f"{term.denominator}#{number}") for term in self.auxiliary)
        return replace(self, denominator=f"{self.denominator}#{number}", auxiliary=terms)

    @property
    def denominators(self) -> tuple[str, ...]:
        """Return the names of all global counts that `optim_step` needs, with those of auxiliary terms."""
        return (self.denominator, *(term.denominator for term in self.auxiliary))

    def select(self, rows: Rows) -> Rows:
        """Return the rows to train on, with routes only where the objective replays them."""
        return trained_rows(rows if self.replays else rows.without(of_all_tokens()))

    def sums(self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> LossSums:
        """Return the loss sums of a micro-batch by denominator, with gradient, and metrics per token (A,), detached.

        `offsets` (B + 1,) int64 are the starts of each row's action tokens, on the CPU to avoid device synchronisation;
        `predicted` are this forward pass's `log_probs` and `entropy` (A,), `values` (A,), or `scores` (B,).
        """
        if "scores" in predicted:
            offsets = torch.arange(len(offsets), device=offsets.device)
        device = next(iter(predicted.values())).device
        look = Lookup(self, rows, offsets, predicted)
        count = int(offsets[-1])
        per_token, metrics = terms_of(self.loss, look.arguments(self.loss, device), self.settings, count)
        if not per_token.requires_grad and any(value.requires_grad for value in predicted.values()):
            raise UserError(
                f"the loss {self.loss.name} does not depend on {' or '.join(predicted)}: it has no gradient"
            )
        if self.whole_groups:
            # Metrics of a pair count once per row, not once per token.
            metrics = {name: Ragged(value, offsets.to(device)).row_means() for name, value in metrics.items()}
        if "log_probs" in predicted:
            metrics = {**self._drift(look, device), **metrics}
        if self.correction is not None:
            entry, settings = self.correction
            weights, more = terms_of(entry, look.arguments(entry, device), settings, count)
            per_token, metrics = per_token * weights, {**metrics, **more}
        if self.kl is not None:
            entry, settings = self.kl
            divergence = per_token_of(entry, called(entry, look.arguments(entry, device), {}), count)
            per_token = per_token + settings["coef"] * divergence
            metrics["kl_loss"] = divergence.detach()
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * predicted["entropy"]
        if ROUTER_LOSS in predicted:
            per_token = per_token + predicted[ROUTER_LOSS]
        return self._summed(look, per_token), metrics

    def router_sums(self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of the routers' losses alone, if any, on a pipeline rank without the policy's."""
        if ROUTER_LOSS not in predicted:
            return {}
        return self._summed(Lookup(self, rows, offsets, predicted), predicted[ROUTER_LOSS])

    def _summed(self, look: "Lookup", per_token: Tensor) -> dict[str, Tensor]:
        """Return the sum of losses per token (A,), weighted by the aggregation, by its denominator."""
        # Computed on the host, which knows the token counts, to avoid device synchronisation.
        on_host = look.arguments(self.aggregation, look.offsets.device)
        weights = called(self.aggregation, on_host, self.aggregation_settings)
        weights = per_token_of(self.aggregation, weights, int(look.offsets[-1])).to(per_token.device, per_token.dtype)
        return {self.denominator: (per_token * weights).sum()}

    def _drift(self, look: "Lookup", device: torch.device) -> dict[str, Tensor]:
        """Return metrics per token (A,) of a policy's drift from the old, the rollout and the reference policy."""
        current = look.predicted["log_probs"].detach()
        metrics = {"entropy": look.predicted["entropy"].detach(), "log_prob_mean": current}
        old, rollout, reference = (
            look.find(name, device) for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
        )
        if old is not None:
            metrics["kl_old"] = old - current
            if rollout is not None and self.old != "rollout":
                metrics["rollout_log_prob_gap"] = (old - rollout).abs()
        if reference is not None:
            metrics |= {f"kl_reference_{name}": estimate(name, current, reference) for name in ("k1", "k2", "k3")}
        return metrics


@dataclass(frozen=True)
class Lookup:
    """A lookup of a registered function's arguments: tensors of this forward pass, or columns of the rows."""

    objective: Objective
    rows: Rows
    offsets: Tensor
    predicted: Mapping[str, Tensor]

    def arguments(self, entry: Entry, device: torch.device) -> list[Tensor | None]:
        """Return the arguments in the order of the function's parameters.

        Raises KeyError if a required one is missing.
        """
        arguments: list[Tensor | None] = []
        for parameter in (*entry.reads, *entry.optional):
            column = columns_in_training(self.objective.role, entry, (parameter,)).get(parameter, parameter)
            arguments.append(self.find(column, device))
            if arguments[-1] is None and parameter in entry.reads:
                raise KeyError(f"{entry.name} needs {column!r}, which the rows do not have")
        return arguments

    def find(self, name: str, device: torch.device) -> Tensor | None:
        if name == "offsets":
            return self.offsets.to(device)
        if name in self.predicted:
            return self.predicted[name].to(device)
        if name == "old_log_probs" and self.objective.old == "self" and "log_probs" in self.predicted:
            return self.predicted["log_probs"].detach()
        if name == "old_log_probs":
            name = "rollout_log_probs" if self.objective.old == "rollout" else log_probs_column(self.objective.role)
        return column_values(self.rows, name, self.offsets, device)


def column_values(rows: Rows, column: str, offsets: Tensor, device: torch.device) -> Tensor | None:
    """Return a column for losses: payload flat (A,), index (B,), or None if it is missing.

    For `advantages`, `turn_advantages` are repeated over each turn's action tokens, and `advantage` over each row's.
    """
    if column == "advantages" and column not in rows and "turn_advantages" in rows:
        lengths: Ragged = rows["turn_lengths"]
        return rows["turn_advantages"].values.repeat_interleave(lengths.values).to(device)
    if column == "advantages" and column not in rows and "advantage" in rows:
        per_row = rows["advantage"].to(offsets.device)
        return per_row.repeat_interleave(offsets.diff()).to(device)
    values_of_rows = rows.get(column)
    if values_of_rows is None:
        return None
    values: Tensor = values_of_rows.values if isinstance(values_of_rows, Ragged) else values_of_rows
    return values.to(device)


def terms_of(
    entry: Entry, columns: Sequence[Any], settings: Mapping[str, Any], count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss or a correction per token, and its metrics per token, all (A,), A = `count`.

    Raises UserError for other shapes.
    """
    result = called(entry, columns, settings)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UserError(
            f"{entry.name} returned {form_of(result)}; return a tensor of one number per token, and a dict of metrics"
        )
    return per_token_of(entry, result[0], count), {
        name: per_token_of(entry, value, count, f" as the metric {name!r}") for name, value in result[1].items()
    }


def per_token_of(entry: Entry, value: Any, count: int, name: str = "") -> Tensor:
    """Return the values of a registered function for each token.

    Raises UserError for another shape, which would be broadcast.
    """
    if not isinstance(value, Tensor) or value.shape != (count,):
        raise UserError(
            f"{entry.name} returned {form_of(value)}{name} for {count} tokens; return one number for each, ({count},)"
        )
    return value


COUNTED = ("action_tokens", "group", "loss_mask", "finish_reason", "ptx_length", "correct", "observation_tokens")
"""The index columns that `denominators` reads."""


def denominators(index: Rows) -> dict[str, float]:
    """Return the denominators of an optimizer step: global counts of its rows after masking."""
    used = trained_rows(index)
    tokens, groups = float(used["action_tokens"].sum()), float(len(used["group"].unique()))
    counts = {"tokens": tokens, "rows": float(len(used)), "groups": groups}
    # Denominators of auxiliary terms.
    if "ptx_length" in index:
        counts["ptx_tokens"] = float((index["ptx_length"] - 1).clamp(min=0).sum())
    if "correct" in index:
        counts["positive_tokens"] = float(index["action_tokens"][index["correct"] > 0].sum())
    if "observation_tokens" in used:
        counts["observation_tokens"] = float(used["observation_tokens"].sum())
    return counts


@dataclass(frozen=True)
class UpdateCounts:
    """The global data of an optimizer step: denominators of its loss sums, and its rows for messages."""

    counts: Mapping[str, float]
    rows: str

    @staticmethod
    def of(index: Rows) -> "UpdateCounts":
        first = index.take(range(len(index))[:ROWS_SHOWN])
        return UpdateCounts(denominators(index), named_rows(first.uids(), len(index)))


@dataclass
class Accumulated:
    """The objectives that were accumulated for one optimizer step, with their loss sums and global counts."""

    objectives: list[Objective] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    """This process's loss sums by denominator."""
    counts: dict[str, float] = field(default_factory=dict)
    """The global count of each denominator."""
    rows: str = ""
    """The description of the rows for messages."""

    def own_sums(self, objective: Objective) -> Objective:
        """Return the objective with its denominators of this step; a repeated objective keeps its denominators."""
        number = self.objectives.index(objective) if objective in self.objectives else len(self.objectives)
        return objective.numbered(number)

    def add(self, objective: Objective, losses: Mapping[str, float], update: UpdateCounts) -> "Accumulated":
        """Add loss sums of `own_sums(objective)` over rows with these counts; return self."""
        numbered = self.own_sums(objective)
        if objective not in self.objectives:
            self.objectives.append(objective)
        for key in numbered.denominators:
            self.counts[key] = self.counts.get(key, 0.0) + update.counts[key.partition("#")[0]]
        for key, loss in losses.items():
            self.losses[key] = self.losses.get(key, 0.0) + loss
        self.rows = self.rows or update.rows
        return self


def nonfinite_tokens(rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]) -> str:
    """Describe the tokens with a non-finite prediction or column, or the rows; `offsets` (B + 1,) are the starts of
    their actions.
    """
    count, descriptions, columns = int(offsets[-1]), list[str](), dict[str, Tensor | None](predicted)
    for name in (*(name for name, column in rows.items() if isinstance(column, Tensor | Ragged)), "advantages"):
        columns[name] = column_values(rows, name, offsets, offsets.device)
    for name, values in columns.items():
        if values is None or not values.is_floating_point() or len(values) != count:
            continue
        for position in (~torch.isfinite(values.detach())).nonzero().flatten().tolist()[:1]:
            row = int(torch.searchsorted(offsets, torch.tensor(position, device=offsets.device), right=True)) - 1
            number = position - int(offsets[row])
            descriptions.append(
                f"{name} is {values[position].item()} {NAMES_A_TOKEN} {number} of row {rows.uids()[row]}"
            )
    return "; ".join(descriptions) or f"the loss overflowed{named_rows(rows.uids())}"


def with_group_tokens(rows: Rows, index: Rows) -> Rows:
    """Return `rows` with `group_tokens`: action tokens of each row's group in the optimizer step, whose index columns
    are `index`.
    """
    groups = Groups(index["group"])
    tokens = groups.sums(index["action_tokens"] * trained_mask(index))
    return rows.with_columns({"group_tokens": tokens[torch.searchsorted(groups.numbers, rows["group"])]})


def trained_rows(rows: Rows) -> Rows:
    taken = trained_mask(rows)
    return rows if bool(taken.all()) else rows.take(taken)


def trained_mask(index: Rows) -> Tensor:
    """Return the mask (B,) of rows with an action that `loss_mask` keeps, and without a failure of their environment,
    whose score is meaningless.
    """
    mask: Tensor = index["action_tokens"] > 0
    if "loss_mask" in index:
        mask = mask & (index["loss_mask"] > 0)
    if "finish_reason" in index:
        mask = mask & (index["finish_reason"] != FinishReason.ERROR)
    return mask

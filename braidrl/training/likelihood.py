"""Auxiliary likelihood terms: supervised losses in the same optimizer step as the policy loss.

loss = policy sums / their count + ptx_coef · Σ −log π(text) / ptx tokens + positive_coef · Σ −log π(right answers) / their tokens
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braidrl.algorithms import registry
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Entry
from braidrl.data.rows import IDENTITY, Rows


@dataclass(frozen=True)
class Likelihood:
    """One term: `coefficient` times the mean of −log π over the action tokens of `select(rows)`."""

    name: str
    coefficient: float
    loss: Entry
    select: Callable[[Rows], Rows]
    entropy_coef: float = 0.0
    whole_groups: bool = False

    @property
    def denominator(self) -> str:
        return f"{self.name}_tokens"

    def sums(
        self, rows: Rows, offsets: Tensor, predicted: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss sum by its denominator, with gradient, and the loss per token, detached."""
        per_token, _ = self.loss.function(predicted["log_probs"])
        return {self.denominator: self.coefficient * per_token.sum()}, {f"{self.name}_loss": per_token.detach()}


def likelihoods(params: Mapping[str, Any]) -> tuple[Likelihood, ...]:
    """Return the auxiliary terms in an update's parameters."""
    found = []
    if coefficient := params.get("ptx_coef", 0.0):
        found.append(Likelihood("ptx", coefficient, registry.losses["ptx"], text_rows))
    if coefficient := params.get("positive_coef", 0.0):
        found.append(Likelihood("positive", coefficient, registry.losses["sft"], correct_rows))
    return tuple(found)


def text_rows(rows: Rows) -> Rows:
    """Return the pre-training texts attached to rows as separate rows; every token but the first is predicted."""
    tokens: Ragged = rows["ptx_tokens"]
    first = torch.zeros(len(tokens.values), dtype=torch.bool)
    first[tokens.offsets[:-1][tokens.lengths > 0]] = True
    identity: dict[str, Any] = {name: rows[name] for name in IDENTITY}
    texts = Rows(
        identity
        | {
            "tokens": tokens,
            "action_mask": tokens.with_values(~first),
            "sequence_lengths": Ragged(tokens.lengths, torch.arange(len(tokens) + 1)),
            "action_tokens": text_targets(tokens.lengths),
        }
    )
    return texts.take(texts["action_tokens"] > 0)


def text_targets(lengths: Tensor) -> Tensor:
    """Count the predicted tokens of texts of `lengths` (B,): all but the first."""
    return (lengths - 1).clamp(min=0)


def correct_rows(rows: Rows) -> Rows:
    """Return the rows with a correct answer."""
    return rows.take((rows["correct"] > 0) & (rows["action_tokens"] > 0))


def likelihood_counts(index: Rows) -> dict[str, float]:
    """Return the denominators of the auxiliary terms, counted over the rows of an optimizer step."""
    counts = {}
    if "ptx_length" in index:
        counts["ptx_tokens"] = float(text_targets(index["ptx_length"]).sum())
    if "correct" in index:
        counts["positive_tokens"] = float(index["action_tokens"][index["correct"] > 0].sum())
    return counts

"""Ends a run whose engine has come apart from its trainer: weights that did not arrive, or other numerics."""

from __future__ import annotations

from collections.abc import Mapping

from braidrl.errors import UserError

GAP = "train/rollout_log_prob_gap"
JUMP = 20.0
"""A gap so many times the largest before is no change of degree."""
FLOOR = 0.01
"""In nats per token; what is below is nothing to end a run for, whatever it was before."""


class GapWatch:
    """Looks at how far the log-probs of engine and trainer are apart, on average over the tokens of each batch."""

    def __init__(self, limit: float) -> None:
        """`limit` in nats per token."""
        self._limit = limit
        self._largest: float | None = None

    def check(self, metrics: Mapping[str, float | int | None]) -> None:
        """Raises UserError where the gap of a step is over the limit or has jumped."""
        gap = metrics.get(GAP)
        if gap is None:
            return
        before, self._largest = self._largest, max(gap, self._largest or 0.0)
        jumped = before is not None and gap > max(FLOOR, JUMP * before)
        if gap > self._limit or jumped:
            earlier = f", where it was {before:.2g} at most before" if before is not None else ""
            raise UserError(
                f"step {metrics['step']}: engine and trainer give the same tokens log-probs that are {gap:.2g} nats apart on "
                f"average{earlier}. The engine does not have the trainer's weights, or computes otherwise: the step is not saved. "
                "Go on from the last checkpoint with rollout.check_weights=true, or with a higher rollout.max_log_prob_gap"
            )

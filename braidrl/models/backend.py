"""What trains and infers a role: the one protocol that a runtime needs, so that another library's training can take its place.

forward_backward ─┐
forward_backward ─┴─▶ optim_step ─▶ forward           a batch may arrive in pieces of any size, on any rank none at all
                  └───▶ export ─▶ load

`braidrl.models.contract` holds the checks that a backend must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.models.objective import Objective
from braidrl.observe.metrics import Sums

Advance = Callable[[int, int], None]
"""Called after each micro-batch with the rows and tokens that it held."""


class TrainingBackend(Protocol):
    """One rank's part of a role. All ranks of the role make the same calls in the same order, each with rows of its own."""

    def load(self, folder: Path) -> None:
        """Load weights and optimizer state as `export` wrote them under any layout. Raises UserError for another model's."""

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """Predict `log_probs`, `values` or `scores` (`name`) of this rank's rows, possibly none.

        Returns one number per action token (of `scores`, per row), in the order of `rows`.
        """

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Accumulate the gradients of a loss over this rank's rows, possibly none, without dividing them.

        Returns this rank's loss sums by denominator; metrics are added to `sums`.
        """

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divide the accumulated sums and make one optimizer step.

        Args:
            denominators: Global counts, the same on all ranks; a sum whose count is 0 is left out.
            iteration: From 1, for the learning-rate schedule.

        Returns:
            The 2-norm of the global gradient before clipping, or None where nothing was counted.
        """

    def export(self, folder: Path, write: bool = True) -> None:
        """Write a Hugging Face directory with the optimizer's state beside it; one rank is to `write` what all of them have."""

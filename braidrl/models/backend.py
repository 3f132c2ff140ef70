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
"""Told after each micro-batch how many rows and tokens it held."""


class TrainingBackend(Protocol):
    """One rank's part of a role. All ranks of the role make the same calls in the same order, each with rows of its own."""

    def load(self, folder: Path) -> None:
        """Weights and optimizer as `export` left them, whatever the layout was. Raises UserError for another model's."""

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """What the model predicts under `name` for each row's actions, in the order of `rows`."""

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Adds the gradient sums of `rows`; the loss sums by denominator, which ranks add up."""

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """One update with each sum over its global count; the norm of the whole gradient, or None where nothing was counted."""

    def export(self, folder: Path, write: bool = True) -> None:
        """A Hugging Face directory with the optimizer's state beside it; one rank has to `write` what all of them have."""

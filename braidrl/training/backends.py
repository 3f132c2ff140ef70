"""What trains and infers a role: the one protocol that a runtime needs, so that another library's training can take its place.

forward_backward ─┐
forward_backward ─┴─▶ optim_step ─▶ forward           a batch may arrive in pieces of any size, on any rank none at all
                  ├───▶ export ─▶ load
                  └───▶ tensors ─▶ engines

`braidrl.training.backend_contract` holds the checks that a backend must pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.importing import PluginRegistry
from braidrl.observe.metrics import Sums
from braidrl.training.objective import Objective
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.role_settings import dtype_of, learning_rate_of, model_path

Advance = Callable[[int, int], None]
"""Called after each micro-batch with the rows and tokens that it held."""


BACKENDS = PluginRegistry("training backend", {"torch": "braidrl.training.roles.make:torch_backend"})
"""What makes a rank's part of a role: called with a `BackendSpec` it returns a `TrainingBackend`."""


@dataclass(frozen=True)
class BackendSpec:
    """What a backend is made for: one role, on one of the ranks that share it."""

    role: str
    config: Config
    train: bool = True
    """False for a role that is frozen."""
    is_scalar: bool = False
    """True for a critic or a reward model: it predicts `values` or `scores`, and else `log_probs`."""
    is_copy: bool = False
    """True for a frozen copy that takes its weights from a trained role."""
    ranks: DataParallel = field(default_factory=DataParallel)

    @property
    def path(self) -> Path:
        """Return the Hugging Face directory that the model comes from."""
        return model_path(self.role, self.config).expanduser()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the weights in the forward pass."""
        return dtype_of(self.role, self.config)

    @property
    def device(self) -> torch.device:
        """Return where the model belongs."""
        return choose_device(self.config.device)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate after warm-up."""
        return learning_rate_of(self.role, self.config)


class TrainingBackend(Protocol):
    """One rank's part of a role. All ranks of the role make the same calls in the same order, each with rows of its own."""

    role: str
    ranks: DataParallel
    nonfinite: tuple[str, ...] = ()
    """Where this rank's losses of the last update were not finite, in words; a backend need not say it."""

    @property
    def shared_model(self) -> Any:
        """Return the transformers module that an engine of this process may decode with, or None where it needs a copy."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model by its name in the Hugging Face directory, a tied one under each of its names."""

    def load(self, folder: Path) -> None:
        """Load weights and optimizer state as `export` wrote them under any layout. Raises UserError for another model's."""

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """Predict something of this rank's rows.

        Args:
            name: `log_probs`, `values` or `scores`.
            rows: Any number of rows, also none.
            advance: Called after each micro-batch.

        Returns:
            One number per action token (of `scores`, per row), in the order of `rows`.
        """

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Accumulate the gradients of a loss over this rank's rows, without dividing them.

        Args:
            objective: The loss.
            rows: Any number of rows, also none.
            sums: Where metrics are added, under the role's name.
            advance: Called after each micro-batch.

        Returns:
            This rank's loss sums by denominator.
        """

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divide the accumulated sums and make one optimizer step.

        Args:
            denominators: Global counts, the same on all ranks; a sum whose count is 0 is left out.
            iteration: From 1, for the learning-rate schedule.

        Returns:
            The 2-norm of the global gradient before clipping, or None where nothing was counted. Where it is not finite,
            nothing was updated.
        """

    def export(self, folder: Path, write: bool = True) -> None:
        """Write a Hugging Face directory with the optimizer's state beside it.

        Args:
            folder: The directory, which exists.
            write: Whether this rank writes what all ranks have.
        """

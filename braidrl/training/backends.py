"""The protocol of a training backend, which trains and infers a role; runtimes use nothing else, so other libraries can implement it.

forward_backward ─┐
forward_backward ─┴─▶ optim_step ─▶ forward           a batch may arrive in pieces of any size; a rank may get none
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
"""Called after each micro-batch with its numbers of rows and tokens."""


BACKENDS = PluginRegistry("training backend", {"torch": "braidrl.training.roles.make:torch_backend"})
"""Training backends by name: functions from a `BackendSpec` to a `TrainingBackend`."""


@dataclass(frozen=True)
class BackendSpec:
    """The specification of a backend: one role on one of its ranks."""

    role: str
    config: Config
    train: bool = True
    """False for a frozen role."""
    is_scalar: bool = False
    """True for a critic or a reward model, which predicts `values` or `scores` instead of `log_probs`."""
    is_copy: bool = False
    """True for a frozen copy of a trained role's weights."""
    ranks: DataParallel = field(default_factory=DataParallel)

    @property
    def path(self) -> Path:
        """Return the model's Hugging Face directory."""
        return model_path(self.role, self.config).expanduser()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights in the forward pass."""
        return dtype_of(self.role, self.config)

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return choose_device(self.config.device)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate after warm-up."""
        return learning_rate_of(self.role, self.config)


class TrainingBackend(Protocol):
    """One rank's part of a role. All ranks make the same calls in the same order, each with its own rows."""

    role: str
    ranks: DataParallel
    nonfinite: tuple[str, ...] = ()
    """Descriptions of this rank's non-finite losses in the last update; optional."""

    @property
    def shared_model(self) -> Any:
        """Return the transformers module that an engine of this process may share, or None if it needs a copy."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model by its name in the Hugging Face directory, a tied one under each of its names."""

    def load(self, folder: Path) -> None:
        """Load weights and optimizer state that `export` wrote in any layout. Raises UserError for another model's."""

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """Run inference on this rank's rows.

        Args:
            name: `log_probs`, `values` or `scores`.
            rows: Any number of rows, possibly none.
            advance: Called after each micro-batch.

        Returns:
            One number per action token (for `scores`, per row), in the order of `rows`.
        """

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Accumulate the gradients of loss sums over this rank's rows, without dividing them.

        Args:
            objective: The loss.
            rows: Any number of rows, possibly none.
            sums: Receives metrics under the role's name.
            advance: Called after each micro-batch.

        Returns:
            This rank's loss sums by denominator.
        """

    def optim_step(self, denominators: Mapping[str, float], iteration: int) -> float | None:
        """Divide the accumulated sums and run one optimizer step.

        Args:
            denominators: Global counts, the same on all ranks; a sum whose count is 0 is left out.
            iteration: From 1, for the learning-rate schedule.

        Returns:
            The 2-norm of the global gradient before clipping, or None if all counts are 0. A non-finite norm means that nothing
            was updated.
        """

    def export(self, folder: Path, write: bool = True) -> None:
        """Write a Hugging Face directory with the optimizer's state beside it.

        Args:
            folder: An existing directory.
            write: Whether this rank writes the data that all ranks have in full.
        """

"""The protocol of a training backend, which trains and infers a role; runtimes use nothing else, so other libraries can
implement it.

forward_backward ─┐
forward_backward ─┴─▶ optim_step ─▶ forward           a batch may arrive in pieces of any size; a rank may get none
                  ├───▶ export ─▶ load
                  ├───▶ tensors ─▶ engines
                  └───▶ weights ─▶ engines of other processes or layouts, streaming        each rank's shards

A backend lists its optional features in the class attribute `supports` (`names.FEATURES`). `tensor`, `pipeline`,
`sequence` and `shard` are axes of a layout: `spec.join()` returns the rank's coordinates in it. A backend that shards
its model is a `ShardedBackend`.

`braidrl.training.backend_contract` holds the checks that a backend must pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.memory.offload import OffloadableTensors
from braidrl.training.objective import Objective
from braidrl.training.optimizer import CONFIGURED, StepOverrides
from braidrl.training.parallel.layouts import DataParallel, apply_layout
from braidrl.training.role_settings import settings_of
from braidrl.weights.shards import WeightPart

Advance = Callable[[int, int], None]
"""Called after each micro-batch with its numbers of rows and tokens."""


@dataclass
class BackendSpec:
    """The specification of a backend: one role on one of its ranks."""

    role: str
    config: Config
    train: bool = True
    """False for a frozen role."""
    ranks: DataParallel = field(default_factory=DataParallel)
    is_copy: bool = False
    """True for a frozen copy of a trained role's weights."""
    is_scalar: bool = False
    """True for a critic or a reward model, which predicts `values` or `scores` instead of `log_probs`."""
    shares_base: bool = False
    """True for a role whose adapters are on a base that other roles share."""
    path: Path = field(init=False)
    """The model's Hugging Face directory."""
    dtype: torch.dtype = field(init=False)
    """The dtype of the weights in the forward pass."""
    device: torch.device = field(init=False)
    learning_rate: float = field(init=False)
    """The learning rate after warm-up."""
    layout: ParallelLayout = field(init=False)
    """The role's layout, with `data` filled in."""

    def __post_init__(self) -> None:
        settings = settings_of(self.role, self.config)
        self.path, self.dtype, self.learning_rate = settings.model.expanduser(), settings.dtype, settings.learning_rate
        self.device, self.layout = choose_device(self.config.device), settings.layout.resolve(self.ranks.size)

    @property
    def is_adapted(self) -> bool:
        """Return whether the model has the adapters that are configured, if any."""
        return self.train or self.shares_base

    def join(self) -> DataParallel:
        """Return this rank's coordinates in the layout; all ranks of the role call this together, before they build
        their model.

        `gather_rows` gives the rows of all ranks that hold one replica, `all_reduce_gradients` sums over replicas,
        `gradient_norm` counts each element of a DTensor once, and one rank of each replica `is_reporting_rank`. Ranks
        are numbered with tensor fastest.
        """
        return apply_layout(self.layout, self.ranks, self.device)


class TrainingBackend(Protocol):
    """One rank's part of a role.

    All ranks make the same calls in the same order, each with its rows.
    """

    role: str
    ranks: DataParallel
    nonfinite: tuple[str, ...] = ()
    """Descriptions of this rank's non-finite losses in the last update; optional."""

    @property
    def shared_model(self) -> Any:
        """Return the transformers module that an engine of this process may share, or None if it needs a copy."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model by its name in the Hugging Face directory, tied ones by each name."""

    def load(self, folder: Path) -> None:
        """Load weights and optimizer state that `export` wrote in any layout. Raises UserError for another model's."""

    def forward(self, name: str, rows: Rows, advance: Advance | None = None) -> Ragged:
        """Return `log_probs`, `values` (per action token) or `scores` (per row) of this rank's rows, in order; rows may
        be empty.
        """

    def forward_backward(
        self, objective: Objective, rows: Rows, sums: Sums, advance: Advance | None = None
    ) -> dict[str, float]:
        """Accumulate gradients of loss sums over this rank's rows, undivided; return the sums by denominator.

        `sums` gets metrics.
        """

    def optim_step(
        self, denominators: Mapping[str, float], iteration: int, overrides: StepOverrides = CONFIGURED
    ) -> float | None:
        """Divide the accumulated sums by their global counts and make one optimizer step; sums with count 0 are
        skipped.

        Settings in `overrides` hold for this step alone. Returns the 2-norm of the global gradient before clipping, or
        None if all counts are 0. A non-finite norm means that nothing was updated. `iteration`, from 1, is for the
        learning-rate schedule.
        """

    def export(self, folder: Path, write: bool = True) -> None:
        """Write a Hugging Face directory with the optimizer's state; `write` is true on the rank that writes the
        replicated parts.
        """


@runtime_checkable
class ShardedBackend(TrainingBackend, Protocol):
    """A backend whose ranks may hold shards, and whose weights are sent to other processes and layouts."""

    weight_updates: int
    """The number of changes of the weights."""
    device: torch.device
    offloadable: Mapping[str, OffloadableTensors]
    """Tensors to offload while other roles need the device: `weights`, and of a trained role `optimizer`."""

    def weights(self) -> Mapping[str, WeightPart]:
        """Return this rank's part of each tensor by name, without communication; `weights.shards.weight_parts` makes
        them of DTensors.
        """

    def bytes_of(self, part: str) -> int:
        """Return the bytes of an entry of `offloadable`, whether or not it is offloaded."""

"""Copies of a role's weights: to infer in another layout, and to EMA or target-network copies.

training layout   step ─ step ──────────── step ─
                              ╲ moves            ╲     block by block, if the weights have changed when the copy is used
another layout                 infer ─ infer      infer

An EMA copy becomes decay · copy + (1 - decay) · source. Where both have adapters on one base (`rollout.shared_base`),
these alone are copied.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from braidrl.errors import UserError
from braidrl.training.backends import ShardedBackend
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.publisher import TransferVolume
from braidrl.weights.shards import Parts, WeightPart
from braidrl.weights.transfer import LIMIT_BYTES, LayoutCopy


def copy_within(
    worker: ShardedBackend, target: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES, parts: Parts | None = None
) -> LayoutCopy:
    """Plan a copy of a worker's weights, or of some `parts`, on the same ranks; `divided`: the copy is sharded."""
    # If each rank holds both models in full, no communication is needed.
    meet = worker.ranks if worker.ranks.is_sharded or divided else DataParallel()
    return LayoutCopy(parts or worker.weights, target, meet, limit_bytes)


class RoleCopy:
    """A worker without an optimizer that receives another worker's weights on the same ranks; in any layout."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Plan the transfer. Raises UserError if shapes differ or the worker has an optimizer."""
        check_copies(worker, source.role, source.base_shapes)
        self.worker, self.source = worker, source
        # A role with adapters and no optimizer shares its base with the source.
        parts = (partial(role.weights, worker.lora is not None) for role in (worker, source))
        self.copy = copy_within(source, next(parts), worker.ranks.is_sharded, parts=next(parts))
        self._weight_updates = source.weight_updates

    def refresh(self) -> TransferVolume | None:
        """Copy the source's weights if they have changed, otherwise return None; all ranks call this together."""
        if self._weight_updates == self.source.weight_updates:
            return None
        self._weight_updates = self.source.weight_updates
        return self.copy.refresh()

    def move(self, decay: float) -> TransferVolume:
        """Set weights to decay · weights + (1 - decay) · source; all ranks call this at the same time."""
        self.worker.weight_updates += 1
        return self.copy.refresh(keep=decay)


def copied_parts(worker: RoleWorker, source: str, decay: float) -> Mapping[str, WeightPart]:
    """Return the worker's parts as targets of an EMA copy from the role `source`.

    Raises UserError if it has an optimizer.
    """
    check_copies(worker, source, worker.base_shapes)
    worker.weight_updates += 1
    parts = worker.weights(adapters_alone=worker.lora is not None)
    return {name: replace(part, decay=decay) for name, part in parts.items()}


def check_copies(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raise UserError if the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")

"""Roles whose weights follow another role's: a reference that is copied now and then, or an exponential moving average.

source's shards ──block by block, adapters merged──▶ local shards:   own = decay · own + (1 - decay) · source
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from braidrl.errors import UserError
from braidrl.models.parallel.shards import local_shard, shard_of
from braidrl.models.roles.base import RoleWorker
from braidrl.models.weights.mirror import LayoutCopy, local_weight_parts


class Following:
    """A worker that takes its weights from another role on the same ranks, which may have another layout."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Plan the transfer. Raises UserError as `interpolate_weights` does."""
        check_follows(worker, source.role, source.base_shapes)
        self.worker = worker
        self.copy = LayoutCopy(source, partial(local_weight_parts, worker), worker.ranks.is_sharded)

    def move(self, decay: float) -> None:
        """Set the weights to `decay` times their own plus the rest of the source's; all ranks call this at the same time."""
        self.worker.weight_updates += 1
        self.copy.refresh(keep=decay)


@torch.no_grad()
def interpolate_weights(worker: RoleWorker, source_weights: Mapping[str, Tensor], source: str, decay: float) -> None:
    """Set the worker's weights to decay · own + (1 - decay) · source.

    Args:
        worker: A worker without an optimizer.
        source_weights: Full tensors by name, adapters merged.
        source: The source role's name, for messages.
        decay: The share that stays; 0 copies the source.

    Raises:
        UserError: For a model of other shapes, and for a worker with an optimizer.
    """
    check_follows(
        worker, source, {name: source_weights[name].shape for name in worker.base_shapes if name in source_weights}
    )
    worker.ranks.reshard(worker.model)
    worker.weight_updates += 1
    for name, parameter in worker.model.named_parameters():
        own = local_shard(parameter)
        own.lerp_(shard_of(source_weights[name], parameter).to(own), 1.0 - decay)


def check_follows(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raise UserError where the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")

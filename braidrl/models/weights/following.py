"""A role without a loss of its own, whose weights follow those of another role: a reference that is renewed, or a slow average.

source's parts ──block by block, adapters merged──▶ each rank's part of its own:   own = decay · own + (1 - decay) · theirs
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from braidrl.errors import UserError
from braidrl.models.parallel.shards import local_part, part_of
from braidrl.models.roles.base import RoleWorker
from braidrl.models.weights.mirror import LayoutCopy, settled_parts


class Following:
    """A worker that takes its weights from another role's of the same ranks, which may be divided among them in another way."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Raises UserError as `move_towards` does."""
        check_follows(worker, source.role, source.base_shapes)
        self.worker = worker
        self.copy = LayoutCopy(source, partial(settled_parts, worker), worker.ranks.divided)

    def move(self, decay: float) -> None:
        """Weights become `decay` times their own and the rest the source's; all ranks call this at the same time."""
        self.worker.changes += 1
        self.copy.refresh(keep=decay)


@torch.no_grad()
def move_towards(worker: RoleWorker, theirs: Mapping[str, Tensor], source: str, decay: float) -> None:
    """Weights become `decay` times their own and the rest `theirs`, whole and merged, of the role `source`.

    Raises UserError for a model of other shapes, and for one with an optimizer, which has weights of its own.
    """
    check_follows(worker, source, {name: theirs[name].shape for name in worker.base_shapes if name in theirs})
    worker.ranks.settle(worker.model)
    worker.changes += 1
    for name, parameter in worker.model.named_parameters():
        own = local_part(parameter)
        own.lerp_(part_of(theirs[name], parameter).to(own), 1.0 - decay)


def check_follows(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raises UserError where the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")

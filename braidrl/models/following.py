"""A role without a loss of its own, whose weights follow those of another role: a reference that is renewed, or a slow average.

source's parts ──whole, adapters merged──▶ each rank's part of its own:   own = decay · own + (1 - decay) · theirs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from braidrl.errors import UserError
from braidrl.models.lora import merged, plain_names
from braidrl.models.parts import local_part, part_of
from braidrl.models.role_worker import RoleWorker


def follow(worker: RoleWorker, source: RoleWorker, decay: float) -> None:
    """Weights become `decay` times their own and the rest another role's. Raises UserError as `move_towards` does."""
    check_follows(worker, source.role, source.base_shapes)
    source.ranks.settle(source.model)
    theirs = plain_names(source.model, source.model.state_dict(keep_vars=True))
    move(worker, source.ranks.whole_tensors(theirs, merged), decay)


def move_towards(worker: RoleWorker, theirs: Mapping[str, Tensor], source: str, decay: float) -> None:
    """Weights become `decay` times their own and the rest `theirs`, whole and merged, of the role `source`.

    Raises UserError for a model of other shapes, and for one with an optimizer, which has weights of its own.
    """
    check_follows(worker, source, {name: theirs[name].shape for name in worker.base_shapes if name in theirs})
    move(worker, (([name], tensor) for name, tensor in theirs.items()), decay)


def check_follows(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raises UserError where the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")


@torch.no_grad()
def move(worker: RoleWorker, theirs: Iterable[tuple[list[str], Tensor]], decay: float) -> None:
    """Moves each parameter towards the whole tensor of one of its names."""
    worker.ranks.settle(worker.model)
    worker.changes += 1
    ours = dict(worker.model.named_parameters())
    # Two roles may be divided among the ranks in different ways.
    for names, tensor in theirs:
        # Each once: one that is tied has two names, and may lie on two stages.
        for parameter in [ours.pop(name) for name in names if name in ours]:
            own = local_part(parameter)
            own.lerp_(part_of(tensor, parameter).to(own), 1.0 - decay)

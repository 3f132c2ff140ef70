"""Copies of a role's weights: for inference in another layout, or for a role that copies another one (target network, EMA).

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          block by block, if the weights have changed when the copy is used
another layout                 infer ─ infer       infer

A role that copies another has own = decay · own + (1 - decay) · source.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from braidrl.errors import UserError
from braidrl.training.backends import ShardedBackend
from braidrl.training.lora import adapter_parameters
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.roles.base import RoleWorker
from braidrl.weights.publisher import TransferVolume
from braidrl.weights.shards import Parts, WeightPart, weight_parts
from braidrl.weights.transfer import LIMIT_BYTES, LayoutCopy


def local_weight_parts(worker: ShardedBackend, adapters_alone: bool = False) -> Mapping[str, WeightPart]:
    """Return the worker's local shards; with `adapters_alone`, only trained parameters by peft's names."""
    if not adapters_alone:
        return worker.weights()
    assert isinstance(worker, RoleWorker), f"{worker.role} has no adapters"
    worker.ranks.reshard(worker.model)
    return weight_parts(adapter_parameters(worker.model))


def copy_within(worker: ShardedBackend, target: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES) -> LayoutCopy:
    """Plan a copy of a worker's weights on its own ranks; `divided`: the second model is sharded."""
    # If each rank holds both models in full, no communication is needed.
    meet = worker.ranks if worker.ranks.is_sharded or divided else DataParallel()
    return LayoutCopy(partial(local_weight_parts, worker), target, meet, limit_bytes)


class RoleCopy:
    """A worker without an optimizer that takes another worker's weights on the same ranks; their layouts may differ."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Plan the transfer. Raises UserError if shapes differ or the worker has an optimizer."""
        check_copies(worker, source.role, source.base_shapes)
        self.worker, self.source = worker, source
        self.copy = copy_within(source, partial(local_weight_parts, worker), worker.ranks.is_sharded)
        self._weight_updates = source.weight_updates

    def refresh(self) -> TransferVolume | None:
        """Copy the source's weights if they have changed, else return None; all ranks call this at the same time."""
        if self._weight_updates == self.source.weight_updates:
            return None
        self._weight_updates = self.source.weight_updates
        return self.copy.refresh()

    def move(self, decay: float) -> None:
        """Set weights to decay · own + (1 - decay) · source; all ranks call this at the same time."""
        self.worker.weight_updates += 1
        self.copy.refresh(keep=decay)


def copied_parts(worker: RoleWorker, source: str, decay: float) -> Mapping[str, WeightPart]:
    """Return the worker's parts as targets of an EMA copy: decay · own + (1 - decay) · source.

    Args:
        worker: A worker without an optimizer.
        source: The source role's name, for messages.
        decay: The weight of the old values; 0 copies the source.

    Raises:
        UserError: The worker has an optimizer.
    """
    check_copies(worker, source, worker.base_shapes)
    worker.weight_updates += 1
    return {name: replace(part, kept=decay) for name, part in local_weight_parts(worker).items()}


def check_copies(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raise UserError if the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")

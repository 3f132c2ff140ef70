"""A second model with a role's weights, in its own layout: for inference, for the engine, or for a role that follows.

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          block by block, when the weights have changed and somebody needs them
another layout                 infer ─ infer       infer

A role that follows has own = decay · own + (1 - decay) · source: a reference that is copied now and then, or a moving average.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from braidrl.errors import UserError
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.roles.base import RoleWorker
from braidrl.weights.transfer import LIMIT_BYTES, TransferVolume, WeightTransfer
from braidrl.weights.weight_index import WeightPart, gather_weight_index, weight_parts

Parts = Callable[[], Mapping[str, WeightPart]]


class LayoutCopy:
    """Brings local parts of a second model up to date with a first; all ranks that have some of either do so at the same time."""

    def __init__(self, source: Parts, target: Parts, ranks: DataParallel, limit_bytes: int = LIMIT_BYTES) -> None:
        """Plan the transfer. Raises ValueError where the target is another model.

        Args:
            source: Returns this rank's parts of the first model, none where it has none.
            target: Returns those of the second.
            ranks: The ranks that have some of either.
            limit_bytes: Bytes that a rank sends, or receives, in one round.
        """
        self.source, self.target = source, target
        known = gather_weight_index(source(), ranks)
        self.transfer = WeightTransfer(known, known.groups(gather_weight_index(target(), ranks)), ranks, limit_bytes)
        self.traffic = TransferVolume()

    @staticmethod
    def of(worker: RoleWorker, target: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES) -> "LayoutCopy":
        """Plan a copy of a worker's weights on the worker's own ranks; `divided` says whether the second model is sharded."""
        # Where each rank has all of both, nobody is waited for.
        meet = worker.ranks if worker.ranks.is_sharded or divided else DataParallel()
        return LayoutCopy(partial(local_weight_parts, worker), target, meet, limit_bytes)

    def refresh(self, keep: float = 0.0) -> TransferVolume:
        """Copy the current weights; `keep` is the share of the old ones that stays. Returns what travelled."""
        into = {name: replace(part, kept=keep) for name, part in self.target().items()}
        self.traffic = self.transfer.run(self.source(), into)
        return self.traffic


class InferenceCopy:
    """A frozen worker that infers with the weights of a trained one."""

    def __init__(self, worker: RoleWorker, frozen: RoleWorker) -> None:
        """Pair two workers that were just loaded from the same files."""
        self.worker, self.frozen = worker, frozen
        self.copy = LayoutCopy.of(worker, partial(local_weight_parts, frozen), frozen.ranks.is_sharded)
        self._weight_updates = worker.weight_updates

    def refresh(self) -> TransferVolume | None:
        """Bring the frozen worker up to date; all ranks of the role call this at the same time. Returns None where it is."""
        if self._weight_updates == self.worker.weight_updates:
            return None
        self._weight_updates = self.worker.weight_updates
        return self.copy.refresh()


def local_weight_parts(worker: RoleWorker) -> Mapping[str, WeightPart]:
    """Return the worker's local shards after resharding."""
    worker.ranks.reshard(worker.model)
    return weight_parts(worker.model)


class Following:
    """A worker that takes its weights from another role on the same ranks, which may have another layout."""

    def __init__(self, worker: RoleWorker, source: RoleWorker) -> None:
        """Plan the transfer. Raises UserError for a model of other shapes, and for a worker with an optimizer."""
        check_follows(worker, source.role, source.base_shapes)
        self.worker = worker
        self.copy = LayoutCopy.of(source, partial(local_weight_parts, worker), worker.ranks.is_sharded)

    def move(self, decay: float) -> None:
        """Set the weights to `decay` times their own plus the rest of the source's; all ranks call this at the same time."""
        self.worker.weight_updates += 1
        self.copy.refresh(keep=decay)


def following_parts(worker: RoleWorker, source: str, decay: float) -> Mapping[str, WeightPart]:
    """Return the worker's parts, into which weights of another role are put: decay · own + (1 - decay) · source.

    Args:
        worker: A worker without an optimizer.
        source: The source role's name, for messages.
        decay: The share that stays; 0 copies the source.

    Raises:
        UserError: For a worker with an optimizer.
    """
    check_follows(worker, source, worker.base_shapes)
    worker.weight_updates += 1
    return {name: replace(part, kept=decay) for name, part in local_weight_parts(worker).items()}


def check_follows(worker: RoleWorker, source: str, shapes: Mapping[str, torch.Size]) -> None:
    """Raise UserError where the worker is trained by a loss, or its weights have other shapes."""
    if worker.optimizer is not None:
        raise UserError(f"{worker.role} is trained by a loss: it cannot take weights from {source} too")
    if worker.base_shapes != shapes:
        raise UserError(f"{worker.role} cannot take weights from {source}: {worker.path} is another model")

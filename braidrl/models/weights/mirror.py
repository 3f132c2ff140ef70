"""A second model with a role's weights, in its own layout: for inference, for the engine, or for a role that follows.

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          block by block, when the weights have changed and somebody needs them
another layout                 infer ─ infer       infer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.roles.base import RoleWorker
from braidrl.models.weights.transfer import (
    LIMIT_BYTES,
    TransferVolume,
    WeightPart,
    WeightTransfer,
    gather_weight_index,
    weight_parts,
)

Parts = Callable[[], Mapping[str, WeightPart]]


class LayoutCopy:
    """Brings local parts of a second model up to date with a worker; all ranks of the role do so at the same time."""

    def __init__(self, worker: RoleWorker, parts: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES) -> None:
        """Plan the transfer. Raises ValueError where the target is another model.

        Args:
            worker: The source of the weights.
            parts: Returns this rank's parts of the second model.
            divided: Whether the second model is sharded.
            limit_bytes: Bytes that a rank sends, or receives, in one round.
        """
        self.worker, self.parts = worker, parts
        # Where each rank has all of both, nobody is waited for.
        meet = worker.ranks if worker.ranks.is_sharded or divided else DataParallel()
        known = gather_weight_index(local_weight_parts(worker), meet)
        self.transfer = WeightTransfer(known, gather_weight_index(parts(), meet).boxes, meet, limit_bytes)
        self.traffic = TransferVolume()

    def refresh(self, keep: float = 0.0) -> None:
        """Copy the worker's current weights; `keep` is the share of the old ones that stays."""
        into = {name: replace(part, kept=keep) for name, part in self.parts().items()}
        self.traffic = self.transfer.run(local_weight_parts(self.worker), into)


class InferenceCopy:
    """A frozen worker that infers with the weights of a trained one."""

    def __init__(self, worker: RoleWorker, frozen: RoleWorker) -> None:
        """Pair two workers that were just loaded from the same files."""
        self.worker, self.frozen = worker, frozen
        self.copy = LayoutCopy(worker, partial(local_weight_parts, frozen), frozen.ranks.is_sharded)
        self._weight_updates = worker.weight_updates

    def current(self) -> RoleWorker:
        """Return the frozen worker with the current weights; all ranks of the role call this at the same time."""
        if self._weight_updates != self.worker.weight_updates:
            self.copy.refresh()
            self._weight_updates = self.worker.weight_updates
        return self.frozen


def local_weight_parts(worker: RoleWorker) -> Mapping[str, WeightPart]:
    """Return the worker's local shards after resharding."""
    worker.ranks.reshard(worker.model)
    return weight_parts(worker.model)

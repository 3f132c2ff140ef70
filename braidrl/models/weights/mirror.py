"""A second model with a role's weights, in its own layout: what the role infers with, what its engine decodes with, a role that follows it.

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          box to box, when the weights have changed and somebody needs them
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
    holdings,
    weight_parts,
)

Parts = Callable[[], Mapping[str, WeightPart]]


class LayoutCopy:
    """Brings parts of a second model up to date with a worker; all ranks of the role do so at the same time."""

    def __init__(self, worker: RoleWorker, parts: Parts, divided: bool, limit_bytes: int = LIMIT_BYTES) -> None:
        """`parts` are those that this rank has of it, and ranks have `divided` it. Raises ValueError where it is another model."""
        self.worker, self.parts = worker, parts
        # Where each rank has all of both, nobody is waited for.
        meet = worker.ranks if worker.ranks.divided or divided else DataParallel()
        known = holdings(settled_parts(worker), meet)
        self.transfer = WeightTransfer(known, holdings(parts(), meet).boxes, meet, limit_bytes)
        self.traffic = TransferVolume()

    def refresh(self, keep: float = 0.0) -> None:
        """Takes the worker's weights as they are now; `keep` is the share of its own that stays."""
        into = {name: replace(part, kept=keep) for name, part in self.parts().items()}
        self.traffic = self.transfer.run(settled_parts(self.worker), into)


class InferenceCopy:
    """A frozen worker that infers with the weights of one that is trained."""

    def __init__(self, worker: RoleWorker, frozen: RoleWorker) -> None:
        """Both have just been loaded from the same files."""
        self.worker, self.frozen = worker, frozen
        self.copy = LayoutCopy(worker, partial(settled_parts, frozen), frozen.ranks.divided)
        self._changes = worker.changes

    def current(self) -> RoleWorker:
        """The frozen worker with the weights of now; all ranks of the role call this at the same time."""
        if self._changes != self.worker.changes:
            self.copy.refresh()
            self._changes = self.worker.changes
        return self.frozen


def settled_parts(worker: RoleWorker) -> Mapping[str, WeightPart]:
    """What a rank has of a worker's weights when nothing of the others' is with it."""
    worker.ranks.settle(worker.model)
    return weight_parts(worker.model)

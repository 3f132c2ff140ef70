"""A second model of a role in another layout than the one it trains in: what it infers with, or what its engine decodes with.

training layout   step ─ step ──────────── step ─
                              ╲ moves             ╲          box to box, when the weights have changed and somebody needs them
another layout                 infer ─ infer       infer
"""

from __future__ import annotations

from typing import Any

from braidrl.models.data_parallel import DataParallel, by_tensor
from braidrl.models.role_worker import RoleWorker
from braidrl.models.weight_transfer import LIMIT_BYTES, Traffic, WeightTransfer, holdings, weight_parts


class LayoutCopy:
    """Brings `model` up to date with a worker, where `ranks` say how it is divided; all ranks of the role do so at the same time."""

    def __init__(self, worker: RoleWorker, model: Any, ranks: DataParallel, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises ValueError where `model` has a tensor that the worker's has not."""
        self.worker, self.model, self.ranks = worker, model, ranks
        # Where each rank has all of both, nobody is waited for.
        meet = worker.ranks if worker.ranks.divided or ranks.divided else DataParallel()
        parts, wanted = weight_parts(worker.model), weight_parts(model)
        self.transfer = WeightTransfer(holdings(parts, meet), holdings(wanted, meet).boxes, meet, limit_bytes)
        self.traffic = Traffic()

    def refresh(self) -> None:
        """Takes the worker's weights as they are now."""
        self.worker.ranks.settle(self.worker.model)
        self.ranks.settle(self.model)
        into = by_tensor(self.model.state_dict(keep_vars=True))
        self.traffic = self.transfer.run(weight_parts(self.worker.model), {names[0]: own for names, own in into})


class InferenceCopy:
    """A frozen worker that infers with the weights of one that is trained."""

    def __init__(self, worker: RoleWorker, frozen: RoleWorker) -> None:
        """Both have just been loaded from the same files."""
        self.worker, self.frozen = worker, frozen
        self.copy = LayoutCopy(worker, frozen.model, frozen.ranks)
        self._changes = worker.changes

    def current(self) -> RoleWorker:
        """The frozen worker with the weights of now; all ranks of the role call this at the same time."""
        if self._changes != self.worker.changes:
            self.copy.refresh()
            self._changes = self.worker.changes
        return self.frozen

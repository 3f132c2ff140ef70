"""Makes the moves of a process's residency plan: before each stage, what it needs comes to the device and what makes room leaves.

stage ──needs──▶ Residency ──offload, onload──▶ weights and optimizers of roles, engines' copies of weights
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from braidrl.config import Config
from braidrl.flow import Flow, Stage
from braidrl.models.memory.footprint import cache_bytes
from braidrl.models.memory.offload import Movable, storages
from braidrl.models.roles.base import RoleWorker
from braidrl.placement.residency import PUBLISH, Asset, needed_assets, residency_plan, stage_needs
from braidrl.rollout.embedded.engine import EmbeddedEngine

GIB = 1 << 30
NOTHING = frozenset[Asset]()


@dataclass(frozen=True)
class Held:
    """Something of a role that can be put away, its bytes, and what else happens when it is."""

    size: int
    movable: Movable
    before_leaving: Callable[[], object] = lambda: None


class Residency:
    """What of the roles of one process is on its device. Without `trainer.resident_gib` everything is, always."""

    def __init__(self, config: Config, flow: Flow) -> None:
        self.flow = flow
        # Under streaming each role has processes of its own, and nobody to make room for.
        gib = config.trainer.resident_gib if config.runtime != "streaming" else None
        self.budget = None if gib is None else int(gib * GIB)
        self.held: dict[Asset, Held] = {}
        self.shared = frozenset[str]()
        self.copied = frozenset[str]()
        self.resident: set[Asset] = set()
        self.kept, self.current = NOTHING, NOTHING
        # A checkpoint may be written beside a stage that runs.
        self._lock = threading.RLock()

    def add(self, worker: RoleWorker, engine: Any, inferring: RoleWorker | None = None) -> None:
        """Takes charge of a role that was just loaded, with what it infers with, and puts it away: the next one needs the room."""
        if self.budget is None:
            return
        found = held_by(worker)
        if isinstance(engine, EmbeddedEngine):
            found[Asset(worker.role, "engine")] = held_by_engine(worker, engine)
            if engine.model is worker.model:
                self.shared |= {worker.role}
        if inferring is not None:
            found[Asset(worker.role, "inference")] = held_weights(inferring)
            self.copied |= {worker.role}
        self.held |= found
        self.resident |= found.keys()
        self._move(NOTHING)

    def begin(self) -> None:
        """When all roles are there: brings what stays throughout. Raises UserError for a stage that alone is over the budget."""
        sizes = {asset: held.size for asset, held in self.held.items()}
        self.kept = residency_plan(self.flow, sizes, self.budget, self.shared, self.copied).kept
        self._move(NOTHING)

    def before(self, stage: Stage) -> None:
        """Brings what a stage needs; one that needs no model leaves all where it is."""
        if needed := stage_needs(stage, self.shared, self.copied):
            self._move(frozenset(needed))

    def before_publishing(self) -> None:
        """Brings what goes from trainers to engines of their own."""
        if needed := needed_assets(self.flow, self.shared)[PUBLISH]:
            self._move(needed)

    @contextmanager
    def all_of(self, role: str) -> Iterator[None]:
        """Has a role's weights and optimizer here beside what the stage at hand needs; no stage begins meanwhile."""
        with self._lock:
            before = self.current
            self._move(before | {Asset(role, "weights"), Asset(role, "optimizer")})
            yield
            self._move(before)

    def _move(self, needed: frozenset[Asset]) -> None:
        """Leaves on the device what is kept and what is needed; first what is to leave goes."""
        if self.budget is None:
            return
        with self._lock:
            wanted = (self.kept | needed) & self.held.keys()
            for asset in sorted(self.held.keys() - wanted):
                # Noted before: a move that is broken off is made again, whole.
                self.resident.discard(asset)
                self.held[asset].before_leaving()
                self.held[asset].movable.offload()
            for asset in sorted(wanted - self.resident):
                self.held[asset].movable.onload()
                self.resident.add(asset)
            self.current = needed


def held_by(worker: RoleWorker) -> dict[Asset, Held]:
    """A role's weights and, where it is trained, masters, moments and the gradients that a step needs room for."""
    found = {Asset(worker.role, "weights"): held_weights(worker)}
    if worker.optimizer is not None:
        found[Asset(worker.role, "optimizer")] = Held(worker.optimizer.bytes_in_use, worker.movable["optimizer"])
    return found


def held_weights(worker: RoleWorker) -> Held:
    """A worker's weights alone."""
    size = sum(storage.nbytes() for storage in storages(worker.model.parameters()))
    return Held(size, worker.movable["weights"])


def held_by_engine(worker: RoleWorker, engine: EmbeddedEngine) -> Held:
    """An engine's keys and values, and its weights where they are not the trainer's."""
    model = engine.model
    own = [] if model is worker.model else list(model.parameters())
    cache = cache_bytes(model.config, model.dtype.itemsize, engine.slots, engine.max_sequence_tokens)
    return Held(sum(s.nbytes() for s in storages(own)) + cache, Movable(lambda: own), engine.clear)

"""Makes the moves of a process's residency plan: before each stage, what it needs comes to the device and what makes room leaves.

stage ──needs──▶ Residency ──offload, onload──▶ weights and optimizers of roles, engines' copies of weights
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from braidrl.config import Config
from braidrl.engines.engine import RoleEngine
from braidrl.flow import Flow, Kind, Stage
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import TraceWriter
from braidrl.training.backends import TrainingBackend
from braidrl.training.memory.offload import OffloadableTensors, storages
from braidrl.training.memory.residency import PUBLISH, Asset, needed_assets, residency_plan, stage_needs
from braidrl.training.roles.base import RoleWorker
from braidrl.training.roles.make import torch_worker
from braidrl.weights.phases import GenerationWeights
from braidrl.weights.transfer import TransferVolume

GIB = 1 << 30
NOTHING = frozenset[Asset]()


@dataclass(frozen=True)
class Held:
    """Something of a role that can be put away, its bytes, and what else happens when it is."""

    size: int
    offloadable: OffloadableTensors
    before_leaving: Callable[[], object] = lambda: None
    asleep: int | None = None
    """Of an engine, its bytes while it sleeps."""


class WeightMoves:
    """What weights take on their way to another layout: a span each in the trace, and numbers for the next stage's metrics."""

    def __init__(self) -> None:
        self.trace: TraceWriter | None = None
        self.version = 0
        self._sums = Sums()

    def note(self, role: str, moved: TransferVolume | None) -> None:
        """Note one transition of a role's weights, None or without rounds where nothing travelled."""
        if moved is None or not moved.rounds:
            return
        for name in ("received", "rounds", "seconds"):
            self._sums.add(f"weights/{role}/{name}", getattr(moved, name))
        if self.trace is not None:
            self.trace.past(role, "weights", self.version + 1, moved.seconds)

    def note_update(self, role: str, seconds: float) -> None:
        """Note how long it took until a role's new weights generate."""
        self._sums.add(f"weights/{role}/update_seconds", seconds)

    def report(self, sums: Sums) -> None:
        """Add the numbers of the transitions since the last report."""
        sums.merge(self._sums)
        self._sums = Sums()


class Residency:
    """What of the roles of one process is on its device. Without `trainer.resident_gib` everything is, always, save that weights which
    a role trains and generates with in the same memory take turns.
    """

    def __init__(self, config: Config, flow: Flow, moves: WeightMoves) -> None:
        self.flow, self.moves = flow, moves
        self.engines: dict[str, RoleEngine] = {}
        self.asleep: set[str] = set()
        self.phases: dict[str, GenerationWeights] = {}
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

    def add(self, worker: TrainingBackend, engine: RoleEngine | None, inferring: RoleWorker | None = None) -> None:
        """Take charge of a role that was just loaded, with what it infers with, and put it away: the next one needs the room."""
        if engine is not None:
            self.engines[worker.role] = engine
        if engine is not None and engine.memory is not None and engine.memory.weights is not None:
            self.phases[worker.role] = engine.memory.weights
        if self.budget is None:
            return
        worker = torch_worker(worker)
        found = held_by(worker)
        if engine is not None and (memory := engine.memory) is not None:
            shared = memory.model is worker.model
            own = [] if shared else list(memory.model.parameters())
            weights = sum(storage.nbytes() for storage in storages(own))
            offloadable = OffloadableTensors(lambda: own)
            found[Asset(worker.role, "engine")] = Held(memory.cache_bytes + weights, offloadable, engine.clear, weights)
            if shared:
                self.shared |= {worker.role}
        if inferring is not None:
            found[Asset(worker.role, "inference")] = held_weights(inferring)
            self.copied |= {worker.role}
        self.held |= found
        self.resident |= found.keys()
        self._move(NOTHING)

    def begin(self) -> None:
        """Load what stays throughout, once all roles are there. Raises UserError for a stage that alone is over the budget."""
        sizes = {asset: held.size for asset, held in self.held.items()}
        asleep = {asset: held.asleep for asset, held in self.held.items() if held.asleep is not None}
        self.kept = residency_plan(self.flow, sizes, self.budget, self.shared, self.copied, asleep).kept
        self._move(NOTHING)

    def before(self, stage: Stage) -> None:
        """Load what a stage needs; one that needs no model leaves all where it is."""
        if needed := stage_needs(stage, self.shared, self.copied):
            self._sleep_and_wake(stage)
            self._move(frozenset(needed))
            for role, weights in self.phases.items():
                if Asset(role, "weights") in needed:
                    weights.leave()
                elif Asset(role, "engine") in needed:
                    self.moves.note(role, weights.enter())

    def _sleep_and_wake(self, stage: Stage) -> None:
        """Let engines sleep while a stage needs the device for something else, and wake the one that generates."""
        generates = {str(stage.role)} if stage.kind is Kind.GENERATE else set[str]()
        for role in sorted(self.engines.keys() - self.asleep - generates):
            self.engines[role].sleep()
            self.asleep.add(role)
        for role in generates & self.asleep:
            self.engines[role].wake()
            self.asleep.remove(role)

    def before_publishing(self) -> None:
        """Load the weights that go from trainers to engines with weights of their own."""
        if needed := needed_assets(self.flow, self.shared)[PUBLISH]:
            self._move(needed)

    @contextmanager
    def all_of(self, role: str) -> Iterator[None]:
        """Hold a role's weights and optimizer on the device in addition to what the current stage needs; no stage begins meanwhile."""
        with self._lock:
            if role in self.phases:
                self.phases[role].leave()
            before = self.current
            self._move(before | {Asset(role, "weights"), Asset(role, "optimizer")})
            yield
            self._move(before)

    def _move(self, needed: frozenset[Asset]) -> None:
        """Move to and from the device so that it has what is kept and what is needed; what leaves goes first."""
        if self.budget is None:
            return
        with self._lock:
            wanted = (self.kept | needed) & self.held.keys()
            for asset in sorted(self.held.keys() - wanted):
                # Noted before: a move that is broken off is made again, whole.
                self.resident.discard(asset)
                self.held[asset].before_leaving()
                self.held[asset].offloadable.offload()
            for asset in sorted(wanted - self.resident):
                self.held[asset].offloadable.onload()
                self.resident.add(asset)
            self.current = needed


def held_by(worker: RoleWorker) -> dict[Asset, Held]:
    """Return a role's weights and, where it is trained, masters, moments and the gradients that a step needs room for."""
    found = {Asset(worker.role, "weights"): held_weights(worker)}
    if worker.optimizer is not None:
        found[Asset(worker.role, "optimizer")] = Held(worker.optimizer.bytes_in_use, worker.offloadable["optimizer"])
    return found


def held_weights(worker: RoleWorker) -> Held:
    """Return a worker's weights alone."""
    size = sum(storage.nbytes() for storage in storages(worker.model.parameters()))
    return Held(size, worker.offloadable["weights"])

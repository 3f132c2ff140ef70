"""How a version of a role's weights comes to what generates for it, whatever the layout that it is trained in.

engine with the trainer's own weights    they are there
engine with a copy, whole or slices      box to box from the ranks that have divided them, adapters merged
engines in processes of their own        one file on each machine, which its ranks write side by side
servers                                  the same in a folder, which they read, or sent to them from there
"""

from collections.abc import Callable

from braidrl.config import Config
from braidrl.models.backend import TrainingBackend
from braidrl.models.parallel.decoding import Slices
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.roles.base import RoleWorker
from braidrl.models.weights.index import weight_parts
from braidrl.models.weights.mirror import LayoutCopy, local_weight_parts
from braidrl.models.weights.transfer import TransferVolume
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import TraceWriter
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.engine import RoleEngine
from braidrl.rollout.routing.service import EngineService
from braidrl.rollout.weights.joint_file import WeightWriter

Publish = Callable[[int], TransferVolume | None]
"""Has an engine generate with the weights of now, under a version's number; all ranks that generate for the role call it together.
Returns what this rank sent and received for it, None where weights do not travel now."""


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

    def report(self, sums: Sums) -> None:
        """Add the numbers of the transitions since the last report."""
        sums.merge(self._sums)
        self._sums = Sums()


def from_source(worker: TrainingBackend, engine: RoleEngine) -> Publish:
    """Return how an engine takes every full tensor by its name: one of a user's own, or from a backend of a user's own."""

    def publish(version: int) -> None:
        engine.publish(version, worker)

    return publish


def into_copy(worker: TrainingBackend, engine: EmbeddedEngine, slices: Slices | None = None) -> Publish:
    """Return how the engine's own weights, or this rank's slices of them, take the worker's, a bounded number of bytes at a time."""
    if not isinstance(worker, RoleWorker):
        return from_source(worker, engine)
    copy = LayoutCopy(worker, lambda: weight_parts(engine.model, slices), divided=slices is not None)

    def publish(version: int) -> TransferVolume:
        moved = copy.refresh()
        engine.publish(version)
        return moved

    return publish


def through_file(worker: TrainingBackend, engine: EngineService, config: Config) -> Publish:
    """Return how processes of engines, and servers, read what the ranks of their machine have written."""
    if not isinstance(worker, RoleWorker):
        return from_source(worker, engine)
    own = config.roles.get(worker.role)
    # Of ranks that each have everything some may generate alone: those do not wait for the others.
    together = worker.ranks.is_sharded or own is None or own.generate_workers is None
    ranks, rollout = worker.ranks if together else DataParallel(), config.rollout
    asks = rollout.engine == "http"
    in_folder = asks and rollout.servers.weights == "folder"
    # What servers are sent is checked on its way.
    writer = WeightWriter(local_weight_parts(worker), ranks, rollout.check_weights and not asks, repeat=in_folder)

    def publish(version: int) -> TransferVolume:
        parts = local_weight_parts(worker)
        folder = rollout.servers.folder
        engine.publish(version, writer.in_folder(parts, folder) if in_folder else writer.in_memory(parts))
        return writer.traffic

    return publish

"""How a version of a role's weights comes to what generates for it, whatever the layout that it is trained in.

engine with the trainer's own weights    they are there
engine with a whole copy                 box to box from the ranks that have divided them, adapters merged
engines in processes of their own        one file on each machine, which its ranks write side by side
servers                                  a folder of each rank's, in which all weights are whole
"""

from __future__ import annotations

from collections.abc import Callable

from braidrl.config import Config
from braidrl.models.checkpoint import whole_weights
from braidrl.models.data_parallel import DataParallel
from braidrl.models.layout_copy import LayoutCopy
from braidrl.models.role_worker import RoleWorker
from braidrl.models.weight_transfer import weight_parts
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.engine import Weights
from braidrl.rollout.joint_weights import WeightWriter
from braidrl.rollout.service import EngineService

Publish = Callable[[int], None]
"""Has an engine generate with the weights of now, under a version's number; all ranks that generate for the role call it together."""


def publication(worker: RoleWorker, engine: EmbeddedEngine | EngineService, config: Config) -> Publish:
    """The way of one engine; all ranks that generate for the role call this together."""
    if isinstance(engine, EmbeddedEngine):
        return engine.publish if worker.holds_its_weights else into_copy(worker, engine)
    if config.rollout.engine == "http":
        return lambda version: engine.publish(version, Weights(whole_weights(worker)))
    return through_file(worker, engine, config)


def into_copy(worker: RoleWorker, engine: EmbeddedEngine) -> Publish:
    """The engine's own weights take the worker's, a bounded number of bytes at a time."""
    copy = LayoutCopy(worker, engine.model, DataParallel())

    def publish(version: int) -> None:
        copy.refresh()
        engine.publish(version)

    return publish


def through_file(worker: RoleWorker, engine: EngineService, config: Config) -> Publish:
    """The engines' processes read what the ranks of their machine have written."""
    own = config.roles.get(worker.role)
    # Of ranks that each have everything some may generate alone: those do not wait for the others.
    together = worker.ranks.divided or own is None or own.generate_workers is None
    writer = WeightWriter(
        weight_parts(worker.model), worker.ranks if together else DataParallel(), config.rollout.check_weights
    )

    def publish(version: int) -> None:
        worker.ranks.settle(worker.model)
        engine.publish(version, writer.write(weight_parts(worker.model)))

    return publish

"""Generation in a pool of its own: ranks that train a role send its weights to the ranks that only generate for it.

trains      rank 0 ─ its blocks ╮                      ╭─▶ rank 2     its engine's slices, or the whole model for engine processes
            rank 1 ─ its blocks ┴─ one process group ──┴─▶ rank 3     in rounds of bounded bytes, by the plan between layouts
"""

from collections.abc import Iterable, Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from braidrl.config import Config
from braidrl.engines.divided.spmd import SpmdEngine
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.engine import RoleEngine
from braidrl.engines.factory import Publish
from braidrl.errors import UserError
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.role_settings import dtype_of, model_path
from braidrl.training.roles.base import RoleWorker
from braidrl.weights.mirror import LayoutCopy, local_weight_parts
from braidrl.weights.transfer import TransferVolume
from braidrl.weights.weight_index import WeightPart, weight_parts


class ReceivedWeights:
    """In the place of a role's worker where ranks only generate for it; the whole model is here for engines that are asked to read it."""

    shared_model = None

    def __init__(self, role: str, config: Config, ranks: DataParallel) -> None:
        self.role, self.config, self.ranks = role, config, ranks

    @cached_property
    def model(self) -> PreTrainedModel:
        """Return the model in host memory."""
        path = model_path(self.role, self.config).expanduser()
        return load_decoder(path, dtype_of(self.role, self.config), torch.device("cpu")).requires_grad_(False)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.state_dict().items()

    def parts(self, engine: RoleEngine) -> Mapping[str, WeightPart]:
        """Return what is received here: an engine's own weights where they are in this process."""
        if isinstance(engine, EmbeddedEngine):
            return weight_parts(engine.model, engine.slices if isinstance(engine, SpmdEngine) else None)
        return weight_parts(self.model)


def sending(worker: RoleWorker, ranks: DataParallel) -> Publish:
    """Return how a rank that trains sends a version; all `ranks` call this, and what it returns, at the same time."""
    copy = LayoutCopy(partial(local_weight_parts, worker), dict, ranks)

    def publish(version: int) -> None:
        copy.refresh()

    return publish


def receiving(received: ReceivedWeights, engine: RoleEngine, ranks: DataParallel) -> Publish:
    """Return how a rank that generates receives a version and uses it; as for `sending`."""
    copy = LayoutCopy(dict, partial(received.parts, engine), ranks)

    def publish(version: int) -> TransferVolume:
        moved = copy.refresh()
        if isinstance(engine, EmbeddedEngine):
            engine.publish(version)
        else:
            engine.publish(version, received)
        return moved

    return publish


def check_devices_alike(role: str, store: dist.Store, rank: int, device: str) -> None:
    """Raise UserError where this rank's device is of another kind than that of rank 0, which trains; all ranks call this."""
    store.set(f"device/{rank}", device)
    if (trains := store.get("device/0").decode()) != device:
        raise UserError(
            f"placement: {role} trains on {trains} and generates on {device}, and its weights cannot go from one to the other; "
            "write device=cpu, or give both pools devices of one kind"
        )

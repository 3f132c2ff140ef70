"""Replicas of training in the memory of ranks: the tensors that it changes, and their copies from before the batch.

step 5 done ─▶ step 6: train ── a rank is lost ──▶ new groups ──▶ go back: undo step 6 ──▶ share with those that come
                  ╰── keep: copies of weights and optimizer, before the first update

Under `distributed` and `streaming` alike. Where no rank holds everything, all ranks load a checkpoint instead.
"""

import gc
from collections.abc import Collection, Mapping
from traceback import clear_frames

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.engines.deployment import Deployment
from braidrl.errors import UserError, causes
from braidrl.runtimes.executor import StageExecutor
from braidrl.training.role_settings import settings_of

Changing = Mapping[str, Mapping[str, Tensor]]
"""All tensors that training changes, by role and name."""


class Replica:
    """One rank's weights and optimizers, each of them whole."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.undo: tuple[int, Changing] | None = None
        """The tensors after a step, if the training of the next one may have begun."""

    def keep(self, step: int, executor: StageExecutor) -> None:
        """Copy what the training after a step is going to change, once for each step."""
        if self.world.elastic is not None and (self.undo is None or self.undo[0] != step):
            self.undo = None  # frees its memory
            self.undo = step, executor.copy_changing()

    def go_back(self, step: int, executor: StageExecutor) -> None:
        """Undo the training after a step, if it has begun."""
        if self.undo is not None and self.undo[0] == step:
            executor.restore_changing(self.undo[1])
        else:
            self.undo = None

    def share(self, executor: StageExecutor, sender: int, is_new: bool) -> None:
        """Give new processes the tensors of a rank, the sender. All ranks call this together."""
        received = self._broadcast({} if self.world.rank != sender else executor.copy_changing(), sender)
        if is_new:
            executor.restore_changing(received)

    def _broadcast(self, tensors: Changing, sender: int) -> Changing:
        """Return the sender's tensors."""
        about = [
            (role, name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for role, named in tensors.items()
            for name, tensor in named.items()
        ]
        described = self.world.gather("tensors of the run", about)[sender]
        received: dict[str, dict[str, Tensor]] = {}
        with self.world.meeting("tensors of a rank that is back"):
            for role, name, shape, dtype in described:
                is_sender = self.world.rank == sender
                tensor = tensors[role][name] if is_sender else torch.empty(shape, dtype=getattr(torch, dtype))
                dist.broadcast(tensor.contiguous() if is_sender else tensor, src=sender, group=self.world.group)
                received.setdefault(role, {})[name] = tensor
        return received


def are_replicated(roles: Collection[str], deployment: Deployment) -> bool:
    """Return True if each rank of these roles holds all of their weights and optimizer states."""
    layouts = (layout for role in roles for layout in deployment.layouts_of(role).values())
    built_in = all(settings_of(role, deployment.config).backend == "torch" for role in roles)
    return built_in and all(layout.is_replicated for layout in layouts)


def fit(roles: Collection[str], deployment: Deployment, ranks: int) -> bool:
    """Return True if so many ranks can hold these roles in their layouts."""
    try:
        for role in roles:
            for layout in deployment.layouts_of(role).values():
                layout.resolve(ranks)
    except UserError:
        return False
    return ranks > 0


def free_groups(error: BaseException | None) -> None:
    """Free what an error's frames hold, with the process groups in it, after the last other reference."""
    for each in causes(error):
        clear_frames(each.__traceback__)
    gc.unfreeze()
    gc.collect()
    gc.freeze()

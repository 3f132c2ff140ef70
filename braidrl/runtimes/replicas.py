"""Copies of a trained role's state in the memory of its ranks, from which training continues after a loss.

step 5 done ─▶ keep: each rank copies its parts; those that no other rank has go to its neighbour too
            ─▶ step 6: train ── a rank is lost ──▶ new groups ──▶ restore: each rank gets its parts of step 5 anew

Under `distributed` and `streaming`, in any layout of the built-in backend. The shard index says which rank has
which block, and the reshard plan moves the blocks. If one is on no rank, all ranks load a checkpoint instead.
"""

import gc
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from traceback import clear_frames

import torch

from braidrl.cluster.shared_memory import machine
from braidrl.cluster.world import Ranks, World
from braidrl.engines.deployment import Deployment
from braidrl.errors import LostPeers, UserError, causes
from braidrl.runtimes.executor import StageExecutor
from braidrl.training.role_settings import settings_of
from braidrl.weights.boxes import Box
from braidrl.weights.reshard_plan import ShardIndex, TensorGroup, gather_shard_index
from braidrl.weights.shards import WeightPart
from braidrl.weights.transfer import WeightTransfer

HOST = torch.device("cpu")


class Replica:
    """One rank's copies of the tensors that training changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.copies: dict[int, Mapping[str, WeightPart]] = {}
        """The copies after a step, in host memory; while those of the next step are made, also these."""
        self.names: list[str] | None = None
        """The tensors of the plan below; None if the ranks have none yet."""
        self.transfer: WeightTransfer | None = None
        """Moves this rank's lone blocks to its neighbour; None if each block is on several ranks."""
        self.spares: list[tuple[str, torch.Size, torch.dtype, Box]] = []
        """The blocks of another rank that this one keeps."""

    def keep(self, step: int, executor: StageExecutor, retains: bool = False) -> None:
        """Copy the state after a step, once, before it changes; `retains` keeps the copies of an earlier step too.

        All ranks call this together, after they have made the step.
        """
        if step not in self.copies:
            names = list(executor.changing_parts())
            if self.world.reduce("copies of a step", names != self.names, operator.or_, bool):
                self._plan(executor.changing_parts())
            if self.transfer is None and not retains:
                self.copies.clear()  # to free its memory first: every rank has made the step
            copies = executor.copy_changing()
            self.copies[step] = copies if self.transfer is None else self._with_neighbours(self.transfer, copies)
            if self.transfer is not None:
                self.world.meet("copies on other ranks")
        if not retains:
            self.copies = {step: self.copies[step]}

    def copy_again(self, step: int, executor: StageExecutor) -> None:
        """Copy the state after a step for the current ranks; earlier copies stay if a rank is lost in the meantime."""
        earlier, self.copies = self.copies, {}
        try:
            self.keep(step, executor)
        except LostPeers:
            self.copies = earlier
            raise

    def hold(self, step: int, executor: StageExecutor) -> None:
        """Copy this rank's state after a step, unless it is copied, before its models are freed."""
        if step not in self.copies:
            self.copies[step] = executor.copy_changing()

    def restore(self, step: int, executor: StageExecutor, has_state: bool) -> bool:
        """Restore the state after a step on all ranks; return False if a block of it is on no rank.

        A rank that `has_state` undoes its training since then; the other ranks receive their blocks. All ranks call
        this together.
        """
        copies = self.copies.get(step)
        if has_state and copies is not None:
            executor.restore_changing(copies)
        if not any(self.world.gather("ranks without a state", not has_state, bool)):
            return True
        if copies is None:
            copies = executor.copy_changing() if has_state else {}
        ranks, missing, is_whole = Ranks(supervisor=self.world), dict[str, WeightPart](), True
        index_of_copies = gather_shard_index(copies, ranks, machine())
        try:
            missing = {} if has_state else executor.empty_changing(index_of_copies.tensors)
        except LookupError:
            is_whole = False
        index = gather_shard_index(missing, ranks)
        if not all(self.world.gather("ranks that know their tensors", is_whole, bool)):
            return False
        try:
            transfer = WeightTransfer(index_of_copies, index_of_copies.groups(index), ranks, device=HOST)
        except ValueError:  # on every rank
            return False
        transfer.run(copies, missing)
        if not has_state:
            executor.restore_changing(missing)
        return True

    def leave(self) -> None:
        """Discard the current ranks' plan, with their process group."""
        self.names, self.transfer, self.spares = None, None, []

    def _plan(self, parts: Mapping[str, WeightPart]) -> None:
        """Plan which blocks go to a neighbour; all ranks call this together."""
        self.leave()
        ranks = Ranks(supervisor=self.world)
        index = gather_shard_index(parts, ranks, machine())
        groups, names = unreplicated_blocks(index), list(index.tensors)
        if any(group.wanted for group in groups):
            self.transfer = WeightTransfer(index, groups, ranks, device=HOST)
        for group in groups:
            for box in (box for rank, box in group.wanted if rank == self.world.rank):
                for name in (names[tensor] for tensor in group.tensors):
                    tensor = index.tensors[name].tensor
                    self.spares.append((name, torch.Size(group.shape), tensor.dtype, box))
        self.names = list(parts)

    def _with_neighbours(self, transfer: WeightTransfer, copies: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
        """Return this rank's copies, and the copies that it keeps for another rank."""
        spares = {
            name: WeightPart([name], torch.empty(box.sizes, dtype=dtype), (shape, box))
            for name, shape, dtype, box in self.spares
        }
        transfer.run(copies, spares)
        with_spares = dict(copies)
        for name, part in spares.items():
            with_spares[name] = replace(copies[name], other_parts=(part,)) if name in copies else part
        return with_spares


def unreplicated_blocks(index: ShardIndex) -> list[TensorGroup]:
    """Return the groups of tensors with blocks on a single rank, which its neighbour must receive."""
    away = distance_to_neighbour(index.machines)
    groups = []
    for group in index.groups():
        ranks_with = Counter(box for _, box in group.held)
        lone = [(rank, box) for rank, box in group.held if box.elements and ranks_with[box] == 1]
        receivers = [((rank + away) % len(index.machines), box) for rank, box in lone]
        groups.append(replace(group, wanted=receivers if len(index.machines) > 1 else ()))
    return groups


def distance_to_neighbour(machines: Sequence[str]) -> int:
    """Return the distance in ranks to each rank's neighbour: on another machine, if that is possible for all ranks."""
    ranks = range(len(machines))
    apart = (n for n in ranks[1:] if all(machines[rank] != machines[(rank + n) % len(machines)] for rank in ranks))
    return next(apart, 1)


def are_copied(roles: Collection[str], deployment: Deployment) -> bool:
    """Return True if the state of these roles can be copied and restored in memory."""
    return all(settings_of(role, deployment.config).backend == "torch" for role in roles)


def are_replicated(roles: Collection[str], deployment: Deployment) -> bool:
    """Return True if each rank of these roles holds all of their weights and optimizer states."""
    layouts = (layout for role in roles for layout in deployment.layouts_of(role).values())
    return are_copied(roles, deployment) and all(layout.is_replicated for layout in layouts)


def fit(roles: Collection[str], deployment: Deployment, ranks: int) -> bool:
    """Return True if this number of ranks can hold these roles in their layouts."""
    try:
        for role in roles:
            for layout in deployment.layouts_of(role).values():
                layout.resolve(ranks)
    except UserError:
        return False
    return ranks > 0


def free_groups(error: BaseException | None) -> None:
    """Free the process groups that an error's stack frames hold; call it when there are no other references."""
    for cause in causes(error):
        clear_frames(cause.__traceback__)
    gc.unfreeze()
    gc.collect()
    gc.freeze()

"""Ranks of a distributed run that are lost and come back: on what state all of them continue.

step 5 done ─▶ step 6: generate, train ── a rank is lost ──▶ new groups ──▶ undo step 6 ─▶ step 6 again, on fewer ranks
                          │                                                    ▲
                          ╰── copies of weights and optimizer, before the first update

Rows are drawn again by their own numbers, so that the result is that of an undisturbed run. A rank that comes back gets
its state from the first one. Where no rank holds everything, all ranks load the newest checkpoint instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import Rows
from braidrl.engines.deployment import Deployment
from braidrl.errors import UserError
from braidrl.runtimes.interfaces import Position
from braidrl.runtimes.saving.checkpoints import RunState, plain_position
from braidrl.runtimes.spmd.rank_backend import RankBackend
from braidrl.runtimes.spmd.shard import Shard
from braidrl.training.role_settings import settings_of

Changing = Mapping[str, Mapping[str, Tensor]]
"""All tensors that training changes, by role and name."""


@dataclass(frozen=True)
class Undo:
    """The means to undo the training of a step: the run's state before it, and the tensors that it changes."""

    state: RunState
    tensors: Changing


class Regrouping:
    """One rank's share in the passage from one membership to the next."""

    def __init__(self, deployment: Deployment, world: World) -> None:
        self.deployment, self.world = deployment, world
        self.has_replicas = has_replicas(deployment)
        self.undo: Undo | None = None
        self.reached: RunState | None = None
        """The state that this rank has gone back to, until all have; another rank may be lost meanwhile."""
        self.is_loading = False
        """True while the newest checkpoint is loaded: the tensors belong to no step."""
        self.members = world.members
        """The members whose ranks are the owners of the rows in a state."""

    def keep(self, state: RunState, backend: RankBackend) -> None:
        """Copy what the training of a step is going to change, once for each step."""
        if self.world.elastic is None or not self.has_replicas:
            return
        if self.undo is None or self.undo.state.step != state.step:
            self.undo = None  # frees its memory
            self.undo = Undo(state, backend.executor.copy_changing())

    def fits(self) -> bool:
        """Return True if the present number of ranks can hold the roles."""
        try:
            for role in () if self.has_replicas else self.deployment.roles:
                for layout in self.deployment.layouts_of(role).values():
                    layout.resolve(self.world.size)
        except UserError:
            return False
        return True

    def settle(self, done: RunState | None, backend: RankBackend | None) -> RunState | None:
        """Return the state from which all members continue, and take their tensors to it; None if no rank has it.

        `done` is the state after this rank's last whole step, or None in a new process. All members call this.
        """
        done = self.reached or done
        steps = self.world.gather("the last whole steps", done and done.step)
        step = min(number for number in steps if number is not None)
        undo = self.undo if self.undo is not None and self.undo.state.step == step else None
        state = undo.state if undo is not None else done if done is not None and done.step == step else None
        state = self._with_new_owners(state) if state is not None else None
        able = self.has_replicas and not self.is_loading and (state is not None or done is None)
        self.members, self.undo = self.world.members, None
        if not all(self.world.gather("ranks that can go back", able)) or backend is None:
            return None
        if undo is not None and state is not None:
            self.undo = replace(undo, state=state)
            backend.executor.restore_changing(undo.tensors)
        self.reached = state
        backend.regroup()
        if None in steps:
            sender = next(rank for rank, number in enumerate(steps) if number is not None)
            state = self._shared(state, sender, backend)
        assert state is not None
        return state

    def _with_new_owners(self, state: RunState) -> RunState | None:
        """Return a state whose waiting rows are on the present ranks; None if some were on a lost one."""
        now = self.world.members
        ranks = {rank: now.index(member) for rank, member in enumerate(self.members) if member in now}
        try:
            surplus = [table.renumbered(ranks, self.world.rank) for table in state.position.surplus]
        except KeyError:
            return None
        return replace(state, position=state.position._replace(surplus=surplus))

    def _shared(self, state: RunState | None, sender: int, backend: RankBackend) -> RunState:
        """Return the sender's state; new processes get its tensors too."""
        is_sender = self.world.rank == sender
        message = described(state) if is_sender and state is not None else None
        plain, indices = self.world.gather("state of the run", message)[sender]
        if state is None:
            surplus = [
                Shard(unpack_rows(index), torch.tensor(owner), Rows({}), self.world.rank) for index, owner in indices
            ]
            about = json.loads(plain)
            position = Position(about["loader"], about["sampling"], surplus, about["stages"])
            new = RunState(about["step"], about["version"], position, about["fingerprints"])
        sent: Changing = backend.executor.copy_changing() if is_sender else {}
        received = self._broadcast(sent, sender)
        if state is None:
            backend.executor.restore_changing(received)
            return new
        return state

    def _broadcast(self, tensors: Changing, sender: int) -> Changing:
        """Return the sender's tensors."""
        about = [
            (role, name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for role, named in tensors.items()
            for name, tensor in named.items()
        ]
        described = self.world.gather("tensors of the run", about)[sender]
        found: dict[str, dict[str, Tensor]] = {}
        with self.world.meeting("tensors of a rank that is back"):
            for role, name, shape, dtype in described:
                is_sender = self.world.rank == sender
                tensor = tensors[role][name] if is_sender else torch.empty(shape, dtype=getattr(torch, dtype))
                dist.broadcast(tensor.contiguous() if is_sender else tensor, src=sender, group=self.world.group)
                found.setdefault(role, {})[name] = tensor
        return found


def described(state: RunState) -> tuple[str, Sequence[Any]]:
    """Return a state as messages: plain values as in a checkpoint, and index columns and owners of waiting rows."""
    about = {"step": state.step, "version": state.version, "fingerprints": state.fingerprints}
    plain = json.dumps({**about, "stages": state.position.stages, **plain_position(state.position)})
    return plain, [(pack_rows(table.index), table.owner.tolist()) for table in state.position.surplus]


def has_replicas(deployment: Deployment) -> bool:
    """Return True if each rank holds all weights, optimizer states and engines that it needs."""
    config, engines = deployment.config, deployment.engines
    layouts = (layout for role in deployment.roles for layout in deployment.layouts_of(role).values())
    built_in = all(settings_of(role, config).backend == "torch" for role in deployment.roles)
    return built_in and not engines.pools_ranks and not engines.hosts_vllm and all(one.is_replicated for one in layouts)

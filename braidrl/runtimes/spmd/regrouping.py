"""Ranks of a distributed run that are lost and come back: on what state all of them continue.

step 5 done ─▶ step 6: generate, train ── a rank is lost ──▶ new groups ──▶ undo step 6 ─▶ step 6 again, on fewer ranks

Rows are drawn again by their own numbers, so that the result is that of an undisturbed run. A rank that comes back gets
its state from the first one. Where no rank holds everything, all ranks load the newest checkpoint instead.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from braidrl.cluster.world import World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import Rows
from braidrl.engines.deployment import Deployment
from braidrl.runtimes.interfaces import Position
from braidrl.runtimes.replicas import Replica, are_replicated, fit
from braidrl.runtimes.saving.checkpoints import RunState, plain_position
from braidrl.runtimes.spmd.rank_backend import RankBackend
from braidrl.runtimes.spmd.shard import Shard


class Regrouping:
    """One rank's share in the passage from one membership to the next."""

    def __init__(self, deployment: Deployment, world: World) -> None:
        self.deployment, self.world = deployment, world
        self.has_replicas = has_replicas(deployment)
        self.replica = Replica(world)
        self.before: RunState | None = None
        """The state to which the replica can go back."""
        self.reached: RunState | None = None
        """The state that this rank has gone back to, until all have; another rank may be lost meanwhile."""
        self.is_loading = False
        """True while the newest checkpoint is loaded: the tensors belong to no step."""
        self.members = world.members
        """The members whose ranks are the owners of the rows in a state."""

    def keep(self, state: RunState, backend: RankBackend) -> None:
        """Copy what the training of a step is going to change, once for each step."""
        if self.world.elastic is not None and self.has_replicas:
            self.replica.keep(state.step, backend.executor)
            self.before = state

    def fits(self) -> bool:
        """Return True if the present number of ranks can hold the roles."""
        return self.has_replicas or fit(self.deployment.roles, self.deployment, self.world.size)

    def settle(self, done: RunState | None, backend: RankBackend | None) -> RunState | None:
        """Return the state from which all members continue, and take their tensors to it; None if no rank has it.

        `done` is the state after this rank's last whole step, or None in a new process. All members call this.
        """
        done = self.reached or done
        steps = self.world.gather("the last whole steps", done and done.step)
        step = min(number for number in steps if number is not None)
        state = next((known for known in (self.before, done) if known is not None and known.step == step), None)
        state = self._with_new_owners(state) if state is not None else None
        able = self.has_replicas and not self.is_loading and (state is not None or done is None)
        self.members, self.before = self.world.members, None
        if not all(self.world.gather("ranks that can go back", able)) or backend is None:
            self.replica.undo = None
            return None
        self.replica.go_back(step, backend.executor)
        self.reached = self.before = state
        backend.regroup()
        if None in steps:
            sender = next(rank for rank, number in enumerate(steps) if number is not None)
            is_new = state is None
            state = self._shared(state, sender)
            self.replica.share(backend.executor, sender, is_new)
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

    def _shared(self, state: RunState | None, sender: int) -> RunState:
        """Return the sender's state."""
        message = described(state) if self.world.rank == sender and state is not None else None
        plain, indices = self.world.gather("state of the run", message)[sender]
        if state is not None:
            return state
        surplus = [
            Shard(unpack_rows(index), torch.tensor(owner), Rows({}), self.world.rank) for index, owner in indices
        ]
        about = json.loads(plain)
        position = Position(about["loader"], about["sampling"], surplus, about["stages"])
        return RunState(about["step"], about["version"], position, about["fingerprints"])


def described(state: RunState) -> tuple[str, Sequence[Any]]:
    """Return a state as messages: plain values as in a checkpoint, and index columns and owners of waiting rows."""
    about = {"step": state.step, "version": state.version, "fingerprints": state.fingerprints}
    plain = json.dumps({**about, "stages": state.position.stages, **plain_position(state.position)})
    return plain, [(pack_rows(table.index), table.owner.tolist()) for table in state.position.surplus]


def has_replicas(deployment: Deployment) -> bool:
    """Return True if each rank holds all weights, optimizer states and engines that it needs."""
    engines = deployment.engines
    return not engines.pools_ranks and not engines.hosts_vllm and are_replicated(deployment.roles, deployment)

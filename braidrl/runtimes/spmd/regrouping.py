"""Ranks of a distributed run that are lost and come back: on what state all of them continue.

step 5 done ─▶ step 6: generate, train ── a rank is lost ──▶ new groups ──▶ step 5 from memory ─▶ step 6 again

Rows are drawn again by their own numbers, so that the result is that of an undisturbed run. `replicas.py` has the
copies in memory. Where a part of the state is on no rank, all ranks load the newest checkpoint instead.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from braidrl.cluster.world import World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.rows import Rows
from braidrl.engines.deployment import Deployment
from braidrl.runtimes.interfaces import Position
from braidrl.runtimes.replicas import Replica, are_copied, are_replicated, fit
from braidrl.runtimes.saving.checkpoints import RunState, plain_position
from braidrl.runtimes.spmd.rank_backend import RankBackend
from braidrl.runtimes.spmd.shard import Shard


class Regrouping:
    """One rank's share in the change from one membership to the next."""

    def __init__(self, deployment: Deployment, world: World) -> None:
        self.deployment, self.world = deployment, world
        self.has_replicas = has_replicas(deployment)
        """True if each rank has all of its state, and so keeps its models and engines."""
        self.is_copied = are_copied(deployment.roles, deployment)
        """True if the state of training is copied in memory."""
        self.replica = Replica(world)
        self.states: dict[int, RunState] = {}
        """The states of the run, by step, to which the copies belong."""
        self.is_loading = False
        """True while the newest checkpoint is loaded: the tensors belong to no step."""
        self.members = world.members
        """The members whose ranks are the owners of the rows in a state."""

    def keep(self, state: RunState, backend: RankBackend) -> None:
        """Copy the state that the next step will change, once for each step. All members call this together."""
        if self.is_copied:
            self.states[state.step] = state
            self.replica.keep(state.step, backend.executor)
            self.states = {step: self.states[step] for step in self.replica.copies}

    def hold(self, state: RunState | None, backend: RankBackend | None) -> None:
        """Copy the state after this rank's last complete step, unless it has copies, and leave the process groups."""
        if state is not None and backend is not None and self.is_copied and not self.is_loading:
            self.replica.hold(state.step, backend.executor)
            self.states.setdefault(state.step, state)
        self.replica.leave()

    def fits(self) -> bool:
        """Return True if the current number of ranks can hold the roles."""
        return self.has_replicas or fit(self.deployment.roles, self.deployment, self.world.size)

    def wait_for_enough(self) -> None:
        """Wait for lost ranks to return while the remaining ranks cannot hold the roles in their layouts."""
        elastic = self.world.elastic
        assert elastic is not None
        while not self.fits():
            came = elastic.wait_for_waiting() if self.world.first else ()
            self.world.gather("processes that come back", None)
            if came:
                elastic.add(came)
            self.world.regroup()

    def agreed(self, is_new: bool, before: float = math.inf) -> RunState | None:
        """Return the newest state before step `before` that all members except new processes have; None if there is
        none.

        All members call this together.
        """
        steps_here = [step for step in self.replica.copies if step < before]
        complete = {step: state for step in steps_here if (state := self._with_new_owners(self.states[step]))}
        steps = self.world.gather("steps in memory", None if is_new else sorted(complete), list[int] | None)
        of_members = [set(of_rank) for of_rank in steps if of_rank is not None]
        common = set.intersection(*of_members) if of_members else set()
        if not common:
            return None
        state = complete.get(max(common))
        sender = next(rank for rank, of_rank in enumerate(steps) if of_rank is not None)
        return self._shared(state, sender) if None in steps else state

    def load_instead(self) -> None:
        """Discard the copies and their step number: a checkpoint replaces this rank's tensors."""
        self.replica.copies.clear()
        self.states.clear()
        self.is_loading = True

    def end(self, state: RunState, backend: RankBackend) -> None:
        """Keep only the state on which the members agreed, copied for the current ranks."""
        if self.is_copied:
            self.replica.copy_again(state.step, backend.executor)
        self.learn_rows(backend)
        self.states = {state.step: state}
        self.members, self.is_loading = self.world.members, False

    def learn_rows(self, backend: RankBackend) -> None:
        """Let the backends of all members isolate the same rows."""
        backend.deaths.learn(self.world.isolated_rows())

    def _with_new_owners(self, state: RunState) -> RunState | None:
        """Assign a state's waiting rows to the current ranks; return None if a lost rank held some."""
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

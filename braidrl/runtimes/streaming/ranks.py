"""One of the ranks that hold a model under streaming, over all changes of these ranks.

work ─▶ a rank is lost, or comes ─▶ leave the groups, meet anew ─▶ the leader registers ─▶ its first order: go back,
  ▲                                                                                        or load a checkpoint
  ╰────────────────────────────────────────────────────────────────────────────────────────────────────╯

The main process writes memberships to the store, and knows each leader by the membership's number. A rank that has all
of its state keeps its models; another one makes them anew for the present number of ranks.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from braidrl.cluster.membership import Membership
from braidrl.cluster.world import World
from braidrl.errors import LostPeers
from braidrl.queue.client import Client
from braidrl.rewards.verify import RuleRewards
from braidrl.runtimes.replicas import Replica, free_groups
from braidrl.runtimes.streaming.worker import StageLoop, TrainerState, WorkerContext

NOTICE_LIMIT_S = 120.0
"""Seconds in which the main process has to notice a loss."""
MakeContext = Callable[[RuleRewards | None], WorkerContext]
"""Loads the models of a rank; it may use verifiers that run already."""


def leader_of(group: str, membership: Membership) -> str:
    """Return the queue name of the first rank, which takes work for all ranks; it differs for each membership."""
    return f"{group}.{membership.members[0].partition('.')[0]}.{membership.number}"


class Rank:
    """A rank of a group, from its start to the end of the run."""

    def __init__(self, world: World, make: MakeContext, has_replicas: bool, is_copied: bool) -> None:
        """Load the models, unless they depend on ranks that this process does not know yet."""
        self.world, self.make, self.has_replicas, self.is_copied = world, make, has_replicas, is_copied
        self.replica = Replica(world)
        self.rewards: RuleRewards | None = None
        self.context: WorkerContext | None = None
        self.state: TrainerState | None = None
        self.comes = world.is_waiting
        if has_replicas or not world.is_waiting:
            self._load()

    def serve(self) -> None:
        """Work until the run ends. Raises LostPeers if the ranks end with one of them."""
        if self.comes:
            self.world.wait_until_member()
        error, is_changed = None, self.comes
        while True:
            try:
                if is_changed:
                    self._meet(error)
                self._loop().serve()
                return
            except LostPeers as lost:
                if self.world.elastic is None or not self.world.elastic.wait_for_newer(NOTICE_LIMIT_S):
                    raise
                error, is_changed = lost, True

    def _meet(self, error: LostPeers | None) -> None:
        """Join the present ranks."""
        start = time.time()
        self.replica.leave()
        if not self.has_replicas:
            self._unload(error)
        self.world.regroup(error)
        if self.context is None:
            self._load(is_again=True)
        assert self.state is not None
        self.state.changed_at = start

    def _loop(self) -> StageLoop:
        """Return the work as one of the present ranks; the first one registers at the queue."""
        context, world = self.context, self.world
        assert context is not None and self.state is not None, "its models are loaded"
        if world.elastic is not None:
            context = self.context = replace(context, leader=leader_of(context.group.name, world.elastic.membership))
        client = Client(context.queue, context.leader, context.data) if world.first else None
        return StageLoop(context, world, client, self.state)

    def _load(self, is_again: bool = False) -> None:
        """Load the models, for the first time or again for other ranks."""
        self.context = self.make(self.rewards)
        self.rewards = None
        self.state = TrainerState(self.world, self.context.executor, self.replica, self.is_copied)
        self.state.copies_early = not self.has_replicas
        self.state.is_new = self.comes or is_again

    def _unload(self, error: LostPeers | None) -> None:
        """Free the models, with their process groups; verifiers stay."""
        if self.context is not None:
            self.rewards = self.context.executor.generation.release_rewards()
            with suppress(RuntimeError):
                self.context.executor.close()
        self.context = self.state = None
        free_groups(error)

    def close(self) -> None:
        """Free the models and verifiers."""
        if self.context is not None:
            self.context.executor.close()
        elif self.rewards is not None:
            self.rewards.close()

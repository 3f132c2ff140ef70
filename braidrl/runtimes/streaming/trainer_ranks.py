"""The ranks of trained roles as the main process knows them: who they are, who leads, and who holds which state.

a rank is lost ─▶ change: without it ─▶ the leader registers ─▶ all go back to the published version ─▶ settle
                            ▲
a restarted rank waits ─────╯
"""

from collections.abc import Collection, Mapping

from braidrl.cluster.membership import Members
from braidrl.engines.deployment import Deployment
from braidrl.runtimes.replicas import are_copied, are_replicated, fit
from braidrl.runtimes.streaming.ranks import leader_of


class TrainerRanks:
    """The ranks of each trained role whose ranks may change, by group."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        changed = deployment.flow.changed_roles
        self.has_replicas = are_replicated(changed, deployment)
        """True if each rank of a trained role holds all of its state."""
        self.is_copied = are_copied(changed, deployment)
        """True if ranks have copies of a trained role's state in memory."""
        self.by_group: dict[str, Members] = {}
        self.settled: dict[str, set[str]] = {}
        """By group, the ranks that hold the state of the published version, or can go back to it."""

    def members(self, group: str) -> tuple[str, ...] | None:
        """Return the names of a group's ranks, the leader first; None if they never change."""
        return self.by_group[group].membership.members if group in self.by_group else None

    def leader(self, group: str) -> str:
        """Return the name at the queue of a group's first rank."""
        return leader_of(group, self.by_group[group].membership)

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks of each group."""
        return {name: len(ranks.membership.members) for name, ranks in self.by_group.items()}

    def waiting(self) -> bool:
        """Return True if restarted ranks wait to join the others."""
        return any(ranks.waiting() for ranks in self.by_group.values())

    def settle(self, unloaded: Collection[str]) -> None:
        """Record which ranks have completed their tasks after regrouping; groups in `unloaded` have not."""
        for name, ranks in self.by_group.items():
            if name not in unloaded:
                self.settled[name] = set(ranks.membership.members)

    def forget_states(self) -> None:
        """Record that no rank holds the state of a version until all have loaded a checkpoint."""
        self.settled = {name: set() for name in self.by_group}

    def hold_state(self, living: Mapping[str, Collection[str]]) -> bool:
        """Return True if a living rank of each role holds the state of the published version, or a part of it."""
        known = [not self.settled.get(name, set()).isdisjoint(living.get(name, ())) for name in self.by_group]
        return self.is_copied and bool(known) and all(known)

    def change(self, group: str, role: str, dead: Collection[str], alive: Collection[str]) -> None:
        """Write a group's next membership: without dead ranks, and with those that wait.

        If they are too few for the layout, all of its processes are members, and wait for each other.
        """
        ranks = self.by_group[group]
        left = [member for member in ranks.membership.members if member not in dead]
        came = [waiting for waiting in ranks.waiting() if waiting not in dead]
        if not (left and self.has_replicas) and not fit([role], self.deployment, len(left) + len(came)):
            came = [member for member in alive if member not in left]
        ranks.change(dead, came)

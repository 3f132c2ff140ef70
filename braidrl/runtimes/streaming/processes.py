"""The worker processes of a streaming run: started, watched, replaced after a kill, and ended with the run.

main process ─start─▶ worker_process: work ─▶ watch ─▶ ended: restarted, or the trainers regroup, or the run ends
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.membership import Members, RepairBudget, member_name
from braidrl.cluster.process import END_LIMIT_S, Failure, Launcher, Process, ProcessSpec
from braidrl.cluster.process_groups import open_store
from braidrl.cluster.ranks import tell
from braidrl.cluster.row_deaths import skipped_row_line
from braidrl.cluster.watchdog import heartbeat_limit
from braidrl.engines.deployment import Deployment
from braidrl.errors import LostProcess, UserError, WorkerError, suggest
from braidrl.queue.owner import StorageNode
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.groups import ROWS, Group
from braidrl.runtimes.streaming.trainer_ranks import TrainerRanks
from braidrl.runtimes.streaming.worker_process import PREEMPTED, RANKS_LIMIT_S, first_members, meeting_of

PROGRAM = "braidrl.runtimes.streaming.worker_process"
"""The module of what a worker process does."""
READY_LIMIT_S = 600.0
"""Time limit for loading a worker's models."""
PEERS_LIMIT_S = 10.0
"""Seconds that a rank without peers waits for their error."""
ROWS_GROUP = Group(ROWS, "rows", None, (), 1)


@dataclass(eq=False)
class Member:
    """One process of a group."""

    group: Group
    number: int
    starts: int
    process: Process
    started: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Return its name among the members of its ranks."""
        return member_name(self.number, self.starts)

    @property
    def holder(self) -> str:
        """Return its name at the queue, which changes with each start; ranks that may change are each named."""
        return f"{self.group.name}.{self.name}"


class Processes:
    """All worker processes of a run."""

    def __init__(
        self,
        deployment: Deployment,
        folder: Path,
        control: ControlPlane,
        launcher: Launcher,
        queue: str,
        node: StorageNode,
        secret: str,
        kept: Mapping[str, Any],
        repairs: RepairBudget,
    ) -> None:
        """Store the parts; start nothing yet.

        Workers reach the control plane at the address `queue`, and each other's nodes, by the secret. `kept` are the
        examples that passed the length limit, for the process that makes rows of them. `repairs` limits how often lost
        trainers restart; if it allows none, the ranks never change.
        """
        self.deployment, self.config = deployment, deployment.config
        self.folder, self.control, self.launcher = folder, control, launcher
        self.queue, self.secret, self.kept = queue, secret, kept
        self.local_storage = location = node.place()
        self.storage_locations = {location.host: location}
        """The nodes of all workers, and this one."""
        self.members: list[Member] = []
        self.leaving: list[tuple[Member, float]] = []
        """Processes that end by themselves, and the times when they are killed otherwise."""
        self.starts_of: dict[tuple[str, int], int] = {}
        """How often processes that have left were started, by group and number."""
        self.repairs = RepairBudget(self.config.streaming.repairs_per_hour, "streaming.repairs_per_hour")
        self.trainer_repairs = repairs
        self.trained = TrainerRanks(deployment)
        self._store: dist.TCPStore | None = None

    def start(self, groups: Sequence[Group]) -> None:
        """Start every process of these groups. Raises UserError if resources are missing."""
        self.launcher.reserve(self.deployment.pools)
        self.storage_locations |= {
            location.host: location for location in self.launcher.serve(StorageNode, self.secret)
        }
        self._store = open_store(self.launcher.ip, RANKS_LIMIT_S)
        for group in [*groups, ROWS_GROUP]:
            if group.trained and self.trainer_repairs.per_hour:
                store = dist.PrefixStore(meeting_of(self.secret, group), self._store)
                self.trained.by_group[group.name] = Members(store, first_members(group).members)
            for number in range(group.processes):
                self.members.append(Member(group, number, 0, self._start(group, number, 0)))

    def leaders(self) -> dict[str, str]:
        """Return the name at the queue of each trained role's leader."""
        trained = [member for member in self.members if member.group.trained]
        fixed = {str(member.group.role): member.holder for member in trained if member.number == 0}
        roles = {member.group.name: str(member.group.role) for member in trained}
        return fixed | {roles[name]: self.trained.leader(name) for name in self.trained.by_group}

    def leads(self, member: Member) -> str | None:
        """Return the name at the queue of a process that leads its worker, otherwise None."""
        if (ranks := self.trained.members(member.group.name)) is not None:
            return self.trained.leader(member.group.name) if ranks[0] == member.name else None
        return member.holder if member.number % member.group.ranks == 0 else None

    def watch(self, group: str | None = None) -> None:
        """Replace killed workers, and kill hanging ones: of all groups, or of one.

        Raises the error of a worker, and WorkerError for a lost trainer or a worker that does not become ready.
        """
        for leaving in [pair for pair in self.leaving if not pair[0].process.alive or time.monotonic() > pair[1]]:
            leaving[0].process.close(0.0)
            self.leaving.remove(leaving)
        if message := self.control.orders.lost_state:
            error = LostProcess(f"{message}; go on from the last checkpoint")
            error.is_counted = True
            raise error
        settings = self.config.streaming
        silent, gone = set(self.control.silent(settings.lease_s + settings.wait_s)), set[Member]()
        for member in [m for m in self.members if group in (None, m.group.name)]:
            if member in gone:
                continue  # another process of its worker has left, and this one with it
            if member.process.end_if_silent(heartbeat_limit(self.config.cluster.silence_s), self.folder):
                tell(f"{member.process.name} {member.process.describe_end()}")
            # Only leading ranks talk to the queue.
            holder = self.leads(member)
            if member.process.alive and holder in silent:
                member.process.kill()
            is_late = holder is not None and time.monotonic() - member.started > READY_LIMIT_S
            if member.process.alive and is_late and holder not in self.control.holders:
                raise WorkerError(f"{member.process.name} was not ready within {READY_LIMIT_S:g} s")
            if not member.process.alive:
                before = set(self.members)
                self._replace(member)
                gone |= before.difference(self.members)

    def _replace(self, member: Member) -> None:
        """Restart a worker after the end of one process, with all of its ranks. Raises as `watch`."""
        worker = member.group.name, member.number // member.group.ranks
        peers = [peer for peer in self.members if (peer.group.name, peer.number // peer.group.ranks) == worker]
        # A process that only lost its peers is not the cause; the cause is a peer's error, or a kill.
        failure, limit, is_killed = failure_of(member), time.monotonic() + PEERS_LIMIT_S, False
        while failure is not None and failure.follows and time.monotonic() < limit and not is_killed:
            failures = [its_failure for peer in self.members if (its_failure := failure_of(peer)) is not None]
            causes = [f for f in failures if not f.follows and f.kind != "interrupted"]
            if causes:
                raise causes[0].error()
            is_killed = any(died(peer) for peer in peers)
            time.sleep(0.0 if is_killed else 0.05)
        if failure is not None and failure.kind == PREEMPTED and len(self.workers_of(member.group.name)) > 1:
            self._leave(peers)
            tell(f"{member.process.name} was preempted, and has left the run")
            return
        if failure is not None and failure.kind != PREEMPTED and not is_killed:
            raise failure.error()
        killed = next((peer for peer in peers if died(peer)), member)
        if member.group.trained:
            self._lose_trainer(killed)
            return
        if not self.repairs.spend():
            raise WorkerError(
                f"{killed.group.name} {killed.number} has ended ({killed.process.describe_end()}), after "
                f"{self.repairs.per_hour} other losses within an hour; look for their common cause, or raise "
                f"streaming.repairs_per_hour={self.repairs.per_hour}{self.control.deaths.frequent()}"
            )
        # The members then have new processes.
        before, end = set(self.control.deaths.left_out), killed.process.describe_end()
        self.restart(peers)
        for row in sorted(self.control.deaths.left_out - before):
            tell(skipped_row_line(row, "engines", end))

    def _lose_trainer(self, lost: Member) -> None:
        """Let the remaining ranks continue from memory; the lost rank restarts and joins them later.

        Raises LostProcess if no rank of a role has its state, or the budget is spent.
        """
        message = (
            f"{lost.group.name} {lost.number}, which holds weights that have changed, is gone "
            f"({lost.process.describe_end()})"
        )
        ranks = self.trained.members(lost.group.name)
        if ranks is not None and lost.name not in ranks and self.trainer_repairs.spend():
            tell(f"{message}; it starts again by itself, the others go on without it ({self.trainer_repairs})")
            self.trained.by_group[lost.group.name].lose(lost.name)
            self._start_again(lost)
            return
        if not self._remember():
            raise LostProcess(f"{message}; go on from the last checkpoint")
        if not self.trainer_repairs.spend():
            raise LostProcess(f"{message}, after too many others ({self.trainer_repairs})")
        tell(f"{message}; it starts again by itself, the others go on from memory ({self.trainer_repairs})")
        self.continue_from_memory()

    def _remember(self) -> bool:
        """Return True if trainers can continue with the published version, which one of each role's ranks holds."""
        self.trained.settle(self.control.orders.unloaded)
        living: dict[str, list[str]] = {}
        for member in self.members:
            if member.process.alive:
                living.setdefault(member.group.name, []).append(member.name)
        return self.control.weights.outlive_trainers and self.trained.hold_state(living)

    def forget_states(self) -> None:
        """Record that no trainer holds the state of a version until all have loaded a checkpoint."""
        self.control.orders.unloaded = frozenset(member.group.name for member in self.members if member.group.trained)
        self.trained.forget_states()

    def continue_from_memory(self) -> None:
        """Let all trainers regroup, and repeat their work on the next version."""
        with self.control.changed:
            self.regroup()
            self.control.continue_from_memory(self.leaders())
        self.control.notify()

    def regroup(self) -> None:
        """Regroup the ranks of each trained role: without dead ranks, which are restarted, and with waiting ones.

        If they are too few for the layout, they wait for the others. All leases of trainers end.
        """
        self.trained.settle(self.control.orders.unloaded)
        for name in self.trained.by_group:
            processes = [member for member in self.members if member.group.name == name]
            dead = [member for member in processes if not member.process.alive]
            gone, before = {member.name for member in dead}, self.trained.leader(name)
            for member in dead:
                self._start_again(member)
            # In this order: a leader that is refused looks for the next membership.
            self.trained.change(name, str(processes[0].group.role), gone, [member.name for member in processes])
            self.control.fail(before, died=False)
            for member in processes:
                member.started = time.monotonic()  # the leader has to register once more

    def workers_of(self, group: str) -> dict[int, list[Member]]:
        """Return the processes of each worker of a group, by the worker's number."""
        workers: dict[int, list[Member]] = {}
        for member in self.members:
            if member.group.name == group:
                workers.setdefault(member.number // member.group.ranks, []).append(member)
        return workers

    def resize(self, name: str, more: int) -> str:
        """Start `more` engines of a group, or stop its last engines if `more` is negative; return the outcome as text.

        Rows of an engine that leaves are leased again. Raises UserError for a group without engines, without devices,
        or with too few engines left.
        """
        engines = {member.group.name: member.group for member in self.members if member.group.kind == "generate"}
        if name not in engines:
            raise UserError(f"no group {name!r} of this run has engines. {suggest(name, list(engines))}")
        group, workers = engines[name], self.workers_of(name)
        count, least = len(workers) + more, 2 if self.config.streaming.weights == "rolling" else 1
        if count < least:
            raise UserError(
                f"{name} has {number_of_engines(len(workers))}, and the run needs {least}; {-more} cannot leave"
            )
        if more > 0:
            # An engine that is shutting down still uses its devices.
            used = {member.number // group.ranks for member, _ in self.leaving if member.group.name == name} | set(
                workers
            )
            free = [number for number in range(len(used) + more) if number not in used][:more]
            self._check_room(group, free)
            for number in (worker * group.ranks + rank for worker in free for rank in range(group.ranks)):
                starts = self.starts_of.get((name, number), 0)
                self.members.append(Member(group, number, starts, self._start(group, number, starts)))
        for number in sorted(workers)[count:]:
            self._leave(workers[number])
        self.control.change(lambda: self.control.loading.limit_draining(count))
        verb = f"{'join' if more > 0 else 'leave'}{'s' if abs(more) == 1 else ''}"
        return f"{number_of_engines(abs(more))} {verb}; {name} then has {number_of_engines(count)}"

    def _check_room(self, group: Group, workers: Sequence[int]) -> None:
        """Raise UserError if new workers of a group have no devices or servers."""
        key = f"streaming.workers.{group.name}"
        if self.deployment.engines.home == "servers":
            raise UserError(f"{group.name} asks the servers that the run has started with; start it with more of them")
        numbers = [worker * group.ranks + rank for worker in workers for rank in range(group.ranks)]
        if not all(self.launcher.has_room(group.name, number) for number in numbers):
            raise UserError(
                f"no device is free for {len(workers)} more of {group.name}, which started with "
                f"{key}={group.processes // group.ranks}; try again when another has left, or start the run with a "
                f"larger {key}"
            )

    def _leave(self, members: Sequence[Member]) -> None:
        """Stop processes without replacement; their rows are leased again immediately."""
        for member in members:
            self.control.fail(member.holder, died=False)
            self.members.remove(member)
            self.starts_of[member.group.name, member.number] = member.starts + 1
            self.leaving.append((member, time.monotonic() + END_LIMIT_S))
        self.control.change(lambda: None)

    def restart(self, members: Sequence[Member]) -> None:
        """Kill and restart processes; their rows are leased again."""
        for member in members:
            member.process.close(0.0)
            self.control.fail(member.holder)
        for member in members:
            self._start_again(member)

    def _start_again(self, member: Member) -> None:
        """Start a process that has ended."""
        member.process.close(0.0)
        member.starts, member.started = member.starts + 1, time.monotonic()
        member.process = self._start(member.group, member.number, member.starts)

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait for the end of all processes, which the queue notifies, and kill late ones."""
        limit = time.monotonic() + limit_s
        for member in self.members:
            if (ranks := self.trained.members(member.group.name)) and member.name not in ranks:
                member.process.close(0.0)  # it is not notified while it waits to become a rank
        self.members += [member for member, _ in self.leaving]
        self.leaving = []
        while self.members:
            self.members[-1].process.close(max(0.0, limit - time.monotonic()))
            self.members.pop()
        # A traceback would keep the store, and with it its port.
        self.trained.by_group.clear()
        self._store = None

    def _start(self, group: Group, number: int, starts: int) -> Process:
        assert self._store is not None
        # It shares this process's node, and reads the same files.
        makes_rows = group is ROWS_GROUP
        location = (
            self.local_storage if makes_rows else self.storage_locations[self.launcher.node_of(group.name, number)]
        )
        arguments = {
            "config": self.config.model_dump(mode="json"),
            "group": asdict(group),
            "number": number,
            "rank": number % group.ranks,
            "starts": starts,
            "name": f"{group.name}-{number}",
            "holder": f"{group.name}.{number}.{starts}",
            "queue": self.queue,
            "leader": f"{group.name}.{number - number % group.ranks}.{starts}",
            "may_change": group.name in self.trained.by_group,
            "folder": str(self.folder.resolve()),
            "meeting": [self.launcher.ip, self._store.port],
            "secret": self.secret,
            "place": location,
            **({"kept": self.kept} if makes_rows else {}),
        }
        spec = ProcessSpec(f"{group.name}-{number}", f"{PROGRAM}:work", arguments, f"{PROGRAM}:orphaned")
        return (LocalLauncher() if makes_rows else self.launcher).start(group.name, number, spec)


def died(member: Member) -> bool:
    """Return True if a process has ended without a message."""
    return not member.process.alive and member.process.outcome is None


def failure_of(member: Member) -> Failure | None:
    """Return the error that ended a process."""
    outcome = None if member.process.alive else member.process.outcome
    return outcome.failure if outcome else None


def number_of_engines(count: int) -> str:
    """Return a number of engines in words."""
    return f"{count} engine{'s' if count != 1 else ''}"

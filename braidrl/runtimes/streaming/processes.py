"""The worker processes of a streaming run: started, watched, replaced after a kill, and ended with the run.

main process ─start─▶ work: model, executor, connection to the queue
    ─▶ generate, compute or model loop, until the run ends
"""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from braidrl.cluster.child import TaskFailed
from braidrl.cluster.devices import choose_device
from braidrl.cluster.elastic import Meeting
from braidrl.cluster.event_loop import Runner
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.membership import Members, Membership, RepairBudget, member_name
from braidrl.cluster.process import END_LIMIT_S, LOOPBACK, Failure, Launcher, Process, ProcessSpec
from braidrl.cluster.process_groups import connect_store, open_store
from braidrl.cluster.ranks import tell
from braidrl.cluster.row_deaths import skipped_row_line
from braidrl.cluster.watchdog import heartbeat_limit
from braidrl.cluster.world import World, elastic_world, world_at
from braidrl.config import parse_config
from braidrl.engines.deployment import Deployment
from braidrl.engines.engine import NodePart
from braidrl.engines.factory import follow_engines
from braidrl.engines.routing.router import run_together
from braidrl.engines.spanning import OneOf, SpanningEngine
from braidrl.errors import LostProcess, UserError, WorkerError, suggest
from braidrl.observe.progress import Progress
from braidrl.observe.trace import WorkerTrace
from braidrl.queue.client import Client, DataPlane
from braidrl.queue.owner import StorageNode, remove_run
from braidrl.queue.storage import Place
from braidrl.rewards.verify import RuleRewards
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.replicas import are_copied, are_replicated, fit
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.generate import GenerateLoop
from braidrl.runtimes.streaming.groups import ROWS, Group
from braidrl.runtimes.streaming.ranks import Rank, leader_of
from braidrl.runtimes.streaming.weights import remove_weights
from braidrl.runtimes.streaming.worker import WorkerContext, serve_rows
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.pretrained import load_tokenizer

RANKS_LIMIT_S = 600.0
"""Seconds after which ranks give up waiting for another one."""
READY_LIMIT_S = 600.0
"""Time limit for loading a worker's models."""
PEERS_LIMIT_S = 10.0
"""Seconds that a rank without peers waits for their error."""
ROWS_GROUP = Group(ROWS, "rows", None, (), 1)
PREEMPTED = "preempted"
"""The kind of failure of a process that was asked to leave."""


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
        self.trained: dict[str, Members] = {}
        """The ranks of each trained role, by group, if they may change."""
        self.has_replicas = are_replicated(deployment.flow.changed_roles, deployment)
        """True if each rank of a trained role holds all of its state."""
        self.is_copied = are_copied(deployment.flow.changed_roles, deployment)
        """True if ranks have copies of a trained role's state in memory."""
        self.settled: dict[str, set[str]] = {}
        """By group, the ranks that hold the state of the published version, or can go back to it."""
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
                self.trained[group.name] = Members(store, first_members(group).members)
            for number in range(group.processes):
                self.members.append(Member(group, number, 0, self._start(group, number, 0)))

    def leaders(self) -> dict[str, str]:
        """Return the name at the queue of each trained role's leader."""
        fixed = {str(m.group.role): m.holder for m in self.members if m.group.trained and m.number == 0}
        roles = {m.group.name: str(m.group.role) for m in self.members if m.group.trained}
        return fixed | {roles[name]: leader_of(name, ranks.membership) for name, ranks in self.trained.items()}

    def leads(self, member: Member) -> str | None:
        """Return the name at the queue of a process that leads its worker, otherwise None."""
        if (ranks := self.trained.get(member.group.name)) is not None:
            return (
                leader_of(member.group.name, ranks.membership) if ranks.membership.members[0] == member.name else None
            )
        return member.holder if member.number % member.group.ranks == 0 else None

    def ranks(self) -> dict[str, int]:
        """Return the number of ranks of each trained role whose ranks may change."""
        return {name: len(ranks.membership.members) for name, ranks in self.trained.items()}

    def watch(self, group: str | None = None) -> None:
        """Replace killed workers, and kill hanging ones: of all groups, or of one.

        Raises the error of a worker, and WorkerError for a lost trainer or a worker that does not become ready.
        """
        for leaving in [pair for pair in self.leaving if not pair[0].process.alive or time.monotonic() > pair[1]]:
            leaving[0].process.close(0.0)
            self.leaving.remove(leaving)
        if message := self.control.lost_state:
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
        ranks = self.trained.get(lost.group.name)
        if ranks is not None and lost.name not in ranks.membership.members and self.trainer_repairs.spend():
            tell(f"{message}; it starts again by itself, the others go on without it ({self.trainer_repairs})")
            ranks.lose(lost.name)
            self._start_again(lost)
            return
        if not self._remember():
            raise LostProcess(f"{message}; go on from the last checkpoint")
        if not self.trainer_repairs.spend():
            raise LostProcess(f"{message}, after too many others ({self.trainer_repairs})")
        tell(f"{message}; it starts again by itself, the others go on from memory ({self.trainer_repairs})")
        self.continue_from_memory()

    def _remember(self) -> bool:
        """Return True if a rank of each trained role holds the state of the published version, or a part of it."""
        self._note_settled()
        living = {(member.group.name, member.name) for member in self.members if member.process.alive}
        return (
            self.is_copied
            and bool(self.trained)
            and self.control.weights.outlive_trainers
            and all(any((name, member) in living for member in self.settled[name]) for name in self.trained)
        )

    def _note_settled(self) -> None:
        """Record which ranks have completed their tasks after regrouping."""
        for name, ranks in self.trained.items():
            if name not in self.control.unloaded:
                self.settled[name] = set(ranks.membership.members)

    def forget_states(self) -> None:
        """Record that no trainer holds the state of a version until all have loaded a checkpoint."""
        self.control.unloaded = frozenset(member.group.name for member in self.members if member.group.trained)
        self.settled = {name: set() for name in self.trained}

    def waiting(self) -> bool:
        """Return True if restarted trainers wait to join the others."""
        return any(ranks.waiting() for ranks in self.trained.values())

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
        self._note_settled()
        for name, ranks in self.trained.items():
            processes = [member for member in self.members if member.group.name == name]
            dead = [member for member in processes if not member.process.alive]
            gone = {member.name for member in dead}
            for member in dead:
                self._start_again(member)
            left = [member for member in ranks.membership.members if member not in gone]
            came, role = [waiting for waiting in ranks.waiting() if waiting not in gone], [str(processes[0].group.role)]
            if not (left and self.has_replicas) and not fit(role, self.deployment, len(left) + len(came)):
                came = [member.name for member in processes if member.name not in left]
            before = leader_of(name, ranks.membership)
            # In this order: a leader that is refused looks for the next membership.
            ranks.change(gone, came)
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
            if (ranks := self.trained.get(member.group.name)) and member.name not in ranks.membership.members:
                member.process.close(0.0)  # it is not notified while it waits to become a rank
        self.members += [member for member, _ in self.leaving]
        self.leaving = []
        while self.members:
            self.members[-1].process.close(max(0.0, limit - time.monotonic()))
            self.members.pop()
        # A traceback would keep the store, and with it its port.
        self.trained, self._store = {}, None

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
            "may_change": group.name in self.trained,
            "folder": str(self.folder.resolve()),
            "meeting": [self.launcher.ip, self._store.port],
            "secret": self.secret,
            "place": location,
            **({"kept": self.kept} if makes_rows else {}),
        }
        spec = ProcessSpec(f"{group.name}-{number}", f"{__name__}:work", arguments, f"{__name__}:orphaned")
        return (LocalLauncher() if makes_rows else self.launcher).start(group.name, number, spec)


def died(member: Member) -> bool:
    """Return True if a process has ended without a message."""
    return not member.process.alive and member.process.outcome is None


def failure_of(member: Member) -> Failure | None:
    """Return the error that ended a process."""
    outcome = None if member.process.alive else member.process.outcome
    return outcome.failure if outcome else None


def work(arguments: Mapping[str, Any]) -> None:
    """Run one process of a worker group: build its parts, then do the queue's work until the run ends.

    `arguments` are plain data from `Processes`.
    """
    group = Group(**arguments["group"])
    with leaving_on_signal() if group.kind == "generate" else nullcontext():
        work_in(group, arguments)


@contextmanager
def leaving_on_signal() -> Iterator[None]:
    """Let SIGTERM end the block, as for a process that leaves the run.

    A scheduler that reclaims a node sends this signal, and a kill some seconds later.
    """
    signals = list[int]()

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        # Event loops propagate this exception from any point.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        if signals:
            raise TaskFailed(Failure(PREEMPTED, "")) from None
        raise


def work_in(group: Group, arguments: Mapping[str, Any]) -> None:
    """Do the work of one process of a group."""
    config = parse_config(arguments["config"])
    set_up_torch(config)
    location, wait_limit_s = Place(*arguments["place"]), config.cluster.wait_limit_s
    data = DataPlane(location, arguments["holder"], wait_limit_s, arguments["secret"])
    if group.kind == "rows":
        with closing(Client(arguments["queue"], arguments["holder"], data)) as client:
            serve_rows(client, config, arguments["kept"], config.streaming.wait_s)
        return
    flow = build_flow(config)
    prepared = Prepared(config, flow, evaluation_flow(config, flow), load_tokenizer(config.model))
    generating = [str(group.role), *group.policies] if group.kind == "generate" else []
    ip, world = urlsplit(location.address).hostname or LOOPBACK, World()
    if generating:
        ranks: DataParallel = one_of(group, arguments, ip)
        if arguments["rank"] > 0:
            with Runner() as runner:
                runner.run(follow_engines(str(group.role), ranks, prepared.deployment))
            return
    else:
        world = join_ranks(group, arguments, choose_device(config.device).type == "cuda")
        ranks = DataParallel(supervisor=world)
    consumers = {**Consumers(flow).by_name, **Consumers(prepared.evaluation).by_name}
    checks = any(stage.type == "verify" for name in group.consumers for stage in consumers[name].stages)
    local_roles = [str(group.role)] if group.kind == "model" else []
    trace = WorkerTrace(Path(arguments["folder"]), arguments["name"], group.role or group.name)

    def context(rewards: RuleRewards | None = None) -> WorkerContext:
        parts = replace(prepared, running=rewards)
        executor = StageExecutor(parts, local_roles, Progress(bars=False), generating, ranks, group.trained, checks)
        leader = arguments["leader"], arguments["queue"]
        return WorkerContext(group, config.streaming, consumers, executor, data, trace, *leader, location.run, ip)

    with closing(data), closing(trace):
        if generating:
            worker = context()
            with closing(worker.executor), closing(Client(worker.queue, worker.leader, data, True)) as client:
                run_together(worker.executor.engines, GenerateLoop(worker, client).serve)
            return
        role = [str(group.role)]
        how = are_replicated(role, prepared.deployment), are_copied(role, prepared.deployment)
        with closing(Rank(world, context, *how)) as rank:
            rank.serve()
        world.close()


def meeting_of(secret: str, group: Group) -> str:
    """Return the prefix of the keys with which the ranks of a group that may change meet."""
    return f"{secret}/{group.name}"


def first_members(group: Group) -> Membership:
    """Return the initial ranks of a group."""
    return Membership(0, tuple(member_name(number, 0) for number in range(group.processes)))


def one_of(group: Group, arguments: Mapping[str, Any], ip: str) -> OneOf:
    """Return this generating process as a worker of its role, or as one node of a worker."""
    number, workers = arguments["number"] // group.nodes, group.processes // group.nodes
    if group.nodes == 1:
        return OneOf(rank=number, size=workers)
    started = f"{arguments['secret']}/{group.name}.{number}.{arguments['starts']}"
    host, port = arguments["meeting"]
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    spanning = SpanningEngine(store, NodePart(arguments["rank"], group.nodes, ip))
    return OneOf(rank=number, size=workers, spanning=spanning)


def join_ranks(group: Group, arguments: Mapping[str, Any], cuda: bool) -> World:
    """Return the ranks of a worker, which meet at a store; a single process gets a world of one rank."""
    (host, port), rank = arguments["meeting"], arguments["rank"]
    if arguments["may_change"]:
        store = connect_store(host, port, RANKS_LIMIT_S, meeting_of(arguments["secret"], group))
        member = member_name(rank, arguments["starts"])
        return elastic_world(Meeting(store, RANKS_LIMIT_S, cuda, host), member, first_members(group), rank)
    if group.ranks == 1 and not group.divided:
        return World()
    started = f"{meeting_of(arguments['secret'], group)}.{arguments['starts']}"
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    return world_at(store, rank, group.ranks, RANKS_LIMIT_S, cuda, host)


def orphaned(arguments: Mapping[str, Any]) -> None:
    """Remove the run's shared memory after its main process was killed; no other process does."""
    location = Place(*arguments["place"])
    remove_run(location.run, location.storage)
    remove_weights(location.run)


def number_of_engines(count: int) -> str:
    """Return a number of engines in words."""
    return f"{count} engine{'s' if count != 1 else ''}"

"""The worker processes of a streaming run: started, watched, replaced after a kill, and ended with the run.

main process ─start─▶ work: model, executor, connection to the queue
    ─▶ generate, compute or model loop, until the run ends
"""

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from braidrl.cluster.child import TaskFailed
from braidrl.cluster.devices import choose_device
from braidrl.cluster.event_loop import Runner
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.process import END_LIMIT_S, LOOPBACK, Failure, Launcher, Process, ProcessSpec
from braidrl.cluster.process_groups import connect_store, open_store
from braidrl.cluster.ranks import tell
from braidrl.cluster.watchdog import mute_after
from braidrl.cluster.world import World, world_at
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
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.control import DEATHS_OF_ROW, ControlPlane
from braidrl.runtimes.streaming.generate import GenerateLoop
from braidrl.runtimes.streaming.groups import ROWS, Group
from braidrl.runtimes.streaming.weights import remove_weights
from braidrl.runtimes.streaming.worker import StageLoop, WorkerContext, serve_rows
from braidrl.training.loading import load_tokenizer
from braidrl.training.parallel.layouts import DataParallel

RANKS_LIMIT_S = 600.0
"""Seconds after which ranks give up waiting for another one."""
READY_LIMIT_S = 600.0
"""Time limit for loading a worker's models."""
PEERS_LIMIT_S = 10.0
"""Seconds that a rank without peers waits for their error."""
ROWS_GROUP = Group(ROWS, "rows", None, (), 1)
HOUR_S = 3600.0
NAMED = 8
"""The most rows that a message names."""
PREEMPTED = "preempted"
"""The kind of failure of a process that was asked to leave."""


@dataclass
class Member:
    """One process of a group; `holder` is its name at the queue, a new one after each start."""

    group: Group
    number: int
    starts: int
    process: Process
    started: float = field(default_factory=time.monotonic)

    @property
    def holder(self) -> str:
        """Return its name at the queue."""
        return f"{self.group.name}.{self.number}.{self.starts}"


class RepairBudget:
    """The repairs of the last hour: if more are needed, the losses have a common cause."""

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._times = deque[float]()

    def spend(self, now: float) -> bool:
        """Record a repair at a time in seconds; return False if the last hour had as many as are allowed."""
        while self._times and self._times[0] <= now - HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.per_hour:
            return False
        self._times.append(now)
        return True


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
    ) -> None:
        """Store the parts; start nothing yet.

        Workers reach the control plane at the address `queue`, and each other's nodes, by the secret. `kept` are the
        examples that passed the length limit, for the process that makes rows of them.
        """
        self.deployment, self.config = deployment, deployment.config
        self.folder, self.control, self.launcher = folder, control, launcher
        self.queue, self.secret, self.kept = queue, secret, kept
        self.here = place = node.place()
        self.places = {place.host: place}
        """The nodes of all workers, and this one."""
        self.members: list[Member] = []
        self.leaving: list[tuple[Member, float]] = []
        """Processes that end by themselves, and the times when they are killed otherwise."""
        self.starts_of: dict[tuple[str, int], int] = {}
        """How often processes that have left were started, by group and number."""
        self.repairs = RepairBudget(self.config.streaming.repairs_per_hour)
        self._store: dist.TCPStore | None = None

    def start(self, groups: Sequence[Group]) -> None:
        """Start every process of these groups. Raises UserError if resources are missing."""
        self.launcher.reserve(self.deployment.pools)
        self.places |= {place.host: place for place in self.launcher.serve(StorageNode, self.secret)}
        self._store = open_store(self.launcher.ip, RANKS_LIMIT_S)
        for group in [*groups, ROWS_GROUP]:
            for number in range(group.processes):
                self.members.append(Member(group, number, 0, self._start(group, number, 0)))

    def trainers(self) -> dict[str, str]:
        """Return the leader of each trained role, by its name at the queue."""
        return {m.holder: str(m.group.role) for m in self.members if m.group.trained and m.number == 0}

    def watch(self, group: str | None = None) -> None:
        """Replace killed workers, and kill hanging ones: of all groups, or of one.

        Raises the error of a worker, and WorkerError for a lost trainer or a worker that does not get ready.
        """
        for leaving in [one for one in self.leaving if not one[0].process.alive or time.monotonic() > one[1]]:
            leaving[0].process.close(0.0)
            self.leaving.remove(leaving)
        settings = self.config.streaming
        silent = self.control.silent(settings.lease_s + settings.wait_s)
        for member in [one for one in self.members if group in (None, one.group.name)]:
            if member not in self.members:
                continue  # it has left with another process of its worker
            if member.process.end_if_silent(mute_after(self.config.cluster.silence_s), self.folder):
                tell(f"{member.process.name} {member.process.describe_end()}")
            if member.process.alive and member.holder in silent:
                member.process.kill()
            # Only leading ranks talk to the queue.
            is_late = member.number % member.group.ranks == 0 and time.monotonic() - member.started > READY_LIMIT_S
            if member.process.alive and is_late and member.holder not in self.control.holders:
                raise WorkerError(f"{member.process.name} was not ready within {READY_LIMIT_S:g} s")
            if not member.process.alive:
                self._replace(member)

    def _replace(self, member: Member) -> None:
        """Restart a worker after the end of one process, with all of its ranks. Raises as `watch`."""
        worker = member.group.name, member.number // member.group.ranks
        peers = [peer for peer in self.members if (peer.group.name, peer.number // peer.group.ranks) == worker]
        # The error of a process that only lost its peers is not the cause: that is a peer's error, or a kill.
        failure, limit, is_killed = failure_of(member), time.monotonic() + PEERS_LIMIT_S, False
        while failure is not None and failure.follows and time.monotonic() < limit and not is_killed:
            known = [found for peer in self.members if (found := failure_of(peer)) is not None]
            causes = [found for found in known if not found.follows and found.kind != "interrupted"]
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
            raise LostProcess(
                f"{killed.group.name} {killed.number}, which holds weights that have changed, is gone "
                f"({killed.process.describe_end()}); go on from the last checkpoint"
            )
        if not self.repairs.spend(time.monotonic()):
            most = self.control.deaths.most_common(NAMED)
            rows = [uid for (_, uid), count in most if count >= DEATHS_OF_ROW]
            suspects = f"; rows that {DEATHS_OF_ROW} or more lost workers had: {rows}" if rows else ""
            raise WorkerError(
                f"{killed.group.name} {killed.number} is gone ({killed.process.describe_end()}), after "
                f"{self.repairs.per_hour} other losses within an hour; look for their common cause, or raise "
                f"streaming.repairs_per_hour={self.repairs.per_hour}{suspects}"
            )
        before = set(self.control.left_out)
        self.restart(peers)
        for uid in sorted(self.control.left_out - before):
            tell(
                f"row {uid} (source, group, sample) is left out: {DEATHS_OF_ROW} engines have ended with it, the last "
                f"while it ran alone ({killed.process.describe_end()}); it stays without a response"
            )

    def workers_of(self, group: str) -> dict[int, list[Member]]:
        """Return the processes of each worker of a group, by the worker's number."""
        workers: dict[int, list[Member]] = {}
        for member in self.members:
            if member.group.name == group:
                workers.setdefault(member.number // member.group.ranks, []).append(member)
        return workers

    def resize(self, name: str, more: int) -> str:
        """Start `more` engines of a group, or let the last ones leave if `more` is negative; return what was done.

        Rows of an engine that leaves are leased again. Raises UserError for a group without engines, without devices,
        or of which too few would be left.
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
            # The devices of an engine that still ends are in use.
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
        """Let processes end without replacement; their rows are leased again at once."""
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
            member.starts, member.started = member.starts + 1, time.monotonic()
            member.process = self._start(member.group, member.number, member.starts)

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait for the end of all processes, which the queue notifies, and kill those that are late."""
        limit = time.monotonic() + limit_s
        self.members += [member for member, _ in self.leaving]
        self.leaving = []
        while self.members:
            self.members[-1].process.close(max(0.0, limit - time.monotonic()))
            self.members.pop()
        # A traceback would keep the store, and with it its port.
        self._store = None

    def _start(self, group: Group, number: int, starts: int) -> Process:
        assert self._store is not None
        # It shares this process's node, and reads the same files.
        makes_rows = group is ROWS_GROUP
        place = self.here if makes_rows else self.places[self.launcher.node_of(group.name, number)]
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
            "folder": str(self.folder.resolve()),
            "meeting": [self.launcher.ip, self._store.port],
            "secret": self.secret,
            "place": place,
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
    """Run one process of a worker group: build what the group needs, then do the queue's work until the run ends.

    `arguments` are plain data from `Processes`.
    """
    group = Group(**arguments["group"])
    with leaving_on_signal() if group.kind == "generate" else nullcontext():
        work_in(group, arguments)


@contextmanager
def leaving_on_signal() -> Iterator[None]:
    """Let SIGTERM end the block as that of a process which leaves the run.

    A scheduler that takes a node back sends this signal, and a kill some seconds later.
    """
    asked = list[int]()

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        # Event loops pass this exception on, wherever it is raised.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        if asked:
            raise TaskFailed(Failure(PREEMPTED, "")) from None
        raise


def work_in(group: Group, arguments: Mapping[str, Any]) -> None:
    """Do the work of one process of a group."""
    config = parse_config(arguments["config"])
    set_up_torch(config)
    place, wait_limit_s = Place(*arguments["place"]), config.cluster.wait_limit_s
    data = DataPlane(place, arguments["holder"], wait_limit_s, arguments["secret"])
    if group.kind == "rows":
        with closing(Client(arguments["queue"], arguments["holder"], data)) as client:
            serve_rows(client, config, arguments["kept"], config.streaming.wait_s)
        return
    flow = build_flow(config)
    prepared = Prepared(config, flow, evaluation_flow(config, flow), load_tokenizer(config.model))
    generating = [str(group.role), *group.policies] if group.kind == "generate" else []
    ip, world = urlsplit(place.address).hostname or LOOPBACK, World()
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
    held = [str(group.role)] if group.kind == "model" else []
    executor = StageExecutor(prepared, held, Progress(bars=False), generating, ranks, group.trained, checks)
    trace = WorkerTrace(Path(arguments["folder"]), arguments["name"], group.role or group.name)
    leader = arguments["leader"], arguments["queue"]
    context = WorkerContext(group, config.streaming, consumers, executor, data, trace, *leader, place.run, ip)
    try:
        # Only leading ranks take from the queue.
        if not world.first:
            StageLoop(context, world, None).follow()
        else:
            with closing(Client(arguments["queue"], arguments["holder"], data, bool(generating))) as client:
                if generating:
                    run_together(executor.engines, GenerateLoop(context, client).serve)
                else:
                    StageLoop(context, world, client).lead()
        world.close()
    finally:
        trace.close()
        executor.close()


def one_of(group: Group, arguments: Mapping[str, Any], ip: str) -> OneOf:
    """Return this generating process as one of the workers of its role, or as one of a worker's nodes."""
    number, workers = arguments["number"] // group.nodes, group.processes // group.nodes
    if group.nodes == 1:
        return OneOf(rank=number, size=workers)
    started = f"{arguments['secret']}/{group.name}.{number}.{arguments['starts']}"
    host, port = arguments["meeting"]
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    spanning = SpanningEngine(store, NodePart(arguments["rank"], group.nodes, ip))
    return OneOf(rank=number, size=workers, spanning=spanning)


def join_ranks(group: Group, arguments: Mapping[str, Any], cuda: bool) -> World:
    """Return the ranks of a worker, which meet at a store; a world of one for a single process."""
    if group.ranks == 1:
        return World()
    host, port = arguments["meeting"]
    started = f"{arguments['secret']}/{group.name}.{arguments['starts']}"
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    return world_at(store, arguments["rank"], group.ranks, RANKS_LIMIT_S, cuda, host)


def orphaned(arguments: Mapping[str, Any]) -> None:
    """Remove the run's shared memory after its main process was killed; no other process does."""
    place = Place(*arguments["place"])
    remove_run(place.run, place.storage)
    remove_weights(place.run)


def number_of_engines(count: int) -> str:
    """Return a number of engines in words."""
    return f"{count} engine{'s' if count != 1 else ''}"

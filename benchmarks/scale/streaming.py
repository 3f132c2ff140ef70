"""A streaming run of many engines and trainer ranks, of which a few are real.

controller, rows process, engine 0, trainer ranks 0, 1 and the last      the product's own processes
all other engines        one process, with the sockets and messages of each; rows have the columns of the first lease
all other trainer ranks  `played.py`; what rank 0 says goes to the other real ranks through a store

Engines and trainer ranks are equally many, and each has as many rows: 2 prompts, 4 samples each. The rows of the other
engines end one engine after the other, over as many seconds at each size.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from benchmarks.scale.played import GROUPS, SAMPLES, PlayedWorld, join_played
from benchmarks.scale.runs import CountedRun, median, settings, write_sums
from braidrl.cluster.local import LocalLauncher, from_server
from braidrl.cluster.process import END_LIMIT_S, Outcome, Process, ProcessSpec
from braidrl.cluster.process_groups import connect_store
from braidrl.cluster.world import World, combined
from braidrl.config import Config, parse_config
from braidrl.data.codec import decode
from braidrl.data.messages import Frame, Packed, pack_message, unpack_message
from braidrl.data.rows import Rows
from braidrl.engines.spanning import OneOf
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.queue.calls import Done, Hello, Lost, QueueRequest, RefusedRequest, Stop, Waited
from braidrl.queue.client import DataPlane, assembled, write_columns
from braidrl.queue.storage import Place
from braidrl.queue.transport import QueueServer, asking_socket
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from braidrl.runtimes.prepare.setup import set_up_torch
from braidrl.runtimes.streaming import generate, program, weights, worker_process
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.train import Trainer
from braidrl.runtimes.streaming.work import (
    Broadcast,
    Ended,
    LeasedRows,
    LoadCheckpoint,
    Loaded,
    LoadWeights,
    Order,
    Save,
    TakeWork,
    WrittenColumns,
)
from braidrl.runtimes.streaming.worker import StageLoop
from braidrl.training.pretrained import load_tokenizer

SOCKETS = 500
"""Sockets of a ZeroMQ context."""
STEPS, WARM = 6, 2
"""Steps of a run, and how many of them only warm caches."""
SPREAD_S = 4.0
"""Seconds over which the rows of the other engines end."""
RECORD, LIMIT_S = "what rank 0 says", 600.0


def config_of(folder: Path, devices: int, steps: int = STEPS) -> Config:
    """Return the configuration of a run on half as many engines and half as many trainer ranks."""
    each = devices // 2
    return settings(
        folder,
        each,
        steps,
        "algorithm.kl_coef=0",
        "runtime=streaming",
        f"streaming.workers={{actor.generate: {each}, actor: {each}}}",
        f"rollout.slots={GROUPS * SAMPLES}",
        "trainer.max_restarts=0",
    )


# The controller


class CountingServer(QueueServer):
    """A queue server that counts messages, bytes and the seconds of its thread."""

    latest: "CountingServer"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.counts = Counter[str]()
        super().__init__(*arguments, **named)
        CountingServer.latest = self

    def _receive(self, message: Sequence[zmq.Frame]) -> None:
        self.counts.update(messages=1, bytes=sum(len(frame.buffer) for frame in message))
        super()._receive(message)

    def _send(self, sender: bytes, number: int, answer: Any) -> None:
        size = len(pack_message(answer[0])) + sum(memoryview(frame).nbytes for frame in answer[1])
        self.counts.update(messages=1, bytes=size)
        super()._send(sender, number, answer)

    def seconds(self) -> float:
        """Return the processor seconds of the thread that answers requests."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))


def counters() -> dict[str, float]:
    """Return the seconds of the controller and of its queue, and the queue's messages and bytes."""
    server = CountingServer.latest
    answering, wall = server.seconds(), time.monotonic()
    counts = {"seconds": time.process_time(), "answering_s": answering, "wall_s": wall}
    return counts | {name: float(server.counts[name]) for name in ("messages", "bytes")}


@dataclass
class PlayedProcess(Process):
    """A simulated process, for which another one answers."""

    name: str
    launcher: "PlayedLauncher"
    pid: int = 0

    @property
    def alive(self) -> bool:
        return self.launcher.crowd is None or self.launcher.crowd.alive

    @property
    def outcome(self) -> Outcome | None:
        return None if self.launcher.crowd is None else self.launcher.crowd.outcome

    def end_if_silent(self, limit_s: float, folder: Path | None = None) -> bool:
        return False

    def describe_end(self) -> str:
        return "played"

    def interrupt(self) -> None:
        pass

    hang_up = interrupt

    kill = interrupt

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        pass


class PlayedLauncher(LocalLauncher):
    """Starts the real processes, and one that simulates the other engines."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.engines: list[str] = []
        self.crowd: Process | None = None

    def start(self, pool: str, number: int, spec: ProcessSpec) -> Process:
        values = dict(spec.arguments or {})
        group = Group(**values["group"])
        if group.kind == "generate" and number:
            self.engines.append(str(values["holder"]))
            if number == group.processes - 1:
                values["holders"] = self.engines
                self.crowd = from_server(ProcessSpec("other engines", f"{__name__}:play_engines", values, threads=1))
        elif number in real_ranks(group.processes):
            return super().start(pool, number, replace(spec, entry=f"{__name__}:work"))
        return PlayedProcess(f"{pool}-{number}", self)

    def close(self) -> None:
        if self.crowd is not None:
            self.crowd.close()


def real_ranks(size: int) -> set[int]:
    return {0, 1, size - 1}


# Processes that are real


def work(arguments: Mapping[str, Any]) -> None:
    """Run an engine or a trainer rank, and write its counts."""
    marks: list[dict[str, float]] = []
    if Group(**arguments["group"]).kind == "model":
        play_others(marks)
    else:
        load, write, rows_of = generate.GenerateLoop._load, generate.GenerateLoop._write, [0]

        async def counted(loop: generate.GenerateLoop, answer: LoadWeights) -> None:
            marks.append({"seconds": time.process_time(), "rows": rows_of[0]})
            await load(loop, answer)

        def written(loop: generate.GenerateLoop, work: Any, rows: Rows, *ended: Any) -> None:
            rows_of[0] += len(rows)
            write(loop, work, rows, *ended)

        generate.GenerateLoop._load = counted  # type: ignore[assignment, method-assign]
        generate.GenerateLoop._write = written  # type: ignore[assignment, method-assign]
    try:
        worker_process.work(arguments)
    finally:
        (Path(arguments["folder"]) / f"played-{arguments['name']}.json").write_text(json.dumps(marks))


def play_others(marks: list[dict[str, float]]) -> None:
    """Make this process one rank of a trainer whose other ranks are simulated."""
    worlds = list[StreamedWorld]()

    def join(group: Group, arguments: Mapping[str, Any], cuda: bool) -> World:
        (host, port), rank = arguments["meeting"], arguments["rank"]
        record = StoredRecord(connect_store(host, port, LIMIT_S, RECORD))
        data = DataPlane(Place(*arguments["place"]), f"others of {arguments['holder']}", LIMIT_S, arguments["secret"])
        worlds.append(StreamedWorld(join_played(rank, group.ranks), record, data))
        return worlds[0]

    obey = StageLoop._obey

    def timed(worker: StageLoop, order: Order) -> None:
        name = {Save: "checkpoint", LoadCheckpoint: "resume"}.get(type(order.task))
        start = time.process_time()
        obey(worker, order)
        if name is not None:
            marks.append({name: time.process_time() - start})

    finish = Trainer.finish

    def counted(trainer: Trainer) -> Any:
        ended = finish(trainer)
        marks.append(dict(worlds[0]._counts()))
        return ended

    begin = weights.VersionWriter.begin

    def of_the_first(writer: weights.VersionWriter) -> Any:
        publish = begin(writer)
        return publish if writer.world.first else lambda: None

    worker_process.join_ranks = join
    # The first rank publishes alone: `benchmarks.planning` has the plan of many.
    weights.background_group = lambda: None  # type: ignore[assignment,return-value]
    weights.VersionWriter.begin = of_the_first  # type: ignore[assignment, method-assign]
    Trainer.finish = counted  # type: ignore[assignment, method-assign]
    StageLoop._obey = timed  # type: ignore[assignment, method-assign]


class StoredRecord:
    """Keeps the messages of rank 0 in a store, from which the other real ranks read them."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.said = store, 0

    def append(self, message: bytes) -> None:
        self.store.set(str(self.said), message)  # type: ignore[arg-type]  # takes bytes too
        self.said += 1

    def __getitem__(self, call: int) -> bytes:
        return bytes(self.store.get(str(call)))


class StreamedWorld(PlayedWorld):
    """The ranks of a streaming trainer, of which one is real; on the leader the simulated ones write columns too."""

    def __init__(self, group: Any, record: StoredRecord, data: DataPlane) -> None:
        self.data, self.leases, self.pieces = data, dict[int, int](), 0
        """The rows of each lease of the batch, and the number of all leases."""
        super().__init__(group, record)

    def reduce(self, purpose: str, value: Any, combine: Any, type: Any = Any) -> Any:
        of_all = super().reduce(purpose, value, combine, type)
        if purpose == "the leader's work":
            with self.counted.modelling():
                answer, _ = unpack_message(of_all, tuple[Broadcast, list[bytes]])
                if isinstance(answer, LeasedRows) and answer.batch is not None:
                    self.leases[answer.lease] = answer.size
                    self.pieces += 1
        return of_all

    def _counts(self) -> dict[str, float]:
        return {**super()._counts(), "leases": self.pieces}

    def reduce_to_first(self, purpose: str, value: Any, combine: Callable[[Any, Any], Any], type: Any = Any) -> Any:
        if purpose != "columns" or not self.first or not value.parts:
            return super().reduce_to_first(purpose, value, combine, type)
        with self.counted.modelling():
            others = self._of_others(value)
            subtrees = [others[start : 2 * start + 1] for start in (2**n - 1 for n in range(len(others).bit_length()))]
            packed = [pack_message(reduce(combine, ranks)) for ranks in subtrees if ranks]
        message = pack_message(value)
        for subtree in packed:
            message = combined(combine, type)(message, subtree)
        return unpack_message(message, type)

    def _of_others(self, mine: WrittenColumns) -> list[WrittenColumns]:
        """Return the columns that the other ranks have written, with the values of this rank's columns."""
        ((payload, size, rows_written),) = mine.parts
        own = {(lease, position) for lease, positions in rows_written for position in positions or ()}
        every = [(lease, position) for lease, size in self.leases.items() for position in range(size)]
        left = [row for row in every if row not in own]
        self.leases.clear()
        share = -(-len(left) // (self.size - 1))
        written, columns = list[WrittenColumns](), dict(mine.index)
        for piece in payload:
            columns |= dict(self.data.read_rows(piece.block, piece.columns).items())  # type: ignore[arg-type]
        for start in range(0, len(left), share):
            rows = defaultdict[int, list[int]](list)
            some = left[start : start + share]
            for lease, position in some:
                rows[lease].append(position)
            part = write_columns(self.data, dict(Rows(columns).take(torch.arange(len(some)) % size).items()))
            index = {name: column for name, column in part.index.items() if isinstance(column, Tensor)}
            written.append(WrittenColumns(index, [(part.payload, len(part), list(rows.items()))]))
        return written


# Engines that are played


@dataclass
class PlayedEngine:
    """A simulated engine, with a socket for its pending request for work and one for its reports."""

    holder: str
    generates_s: float
    """Seconds from a lease to the end of its rows."""
    takes: Any
    reports: Any
    asked: dict[Any, tuple[int, QueueRequest]] = field(default_factory=dict)
    """The number of the latest request and the request itself, by socket."""
    version: int = 0
    held: set[int] = field(default_factory=set)
    ends: bool = False

    def ask(self, socket: Any, request: QueueRequest, frames: Sequence[Frame] = (), wait_s: float = 0.0) -> None:
        request.holder = self.holder
        number = self.asked[socket][0] + 1 if socket in self.asked else 1
        self.asked[socket] = number, request
        socket.send_multipart([pack_message((number, wait_s, request)), *frames], copy=False)


def play_engines(arguments: Mapping[str, Any]) -> None:
    """Take, write and report the rows of all engines except the real one, until the run ends."""
    Crowd(arguments).serve()


class Crowd:
    """All engines except the real one."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.config, self.consumers = parse_config(arguments["config"]), arguments["group"]["consumers"]
        set_up_torch(self.config)
        self.arguments = arguments
        self.data = DataPlane(Place(*arguments["place"]), "the other engines", LIMIT_S, arguments["secret"])
        self.columns: dict[str, Rows] = {}
        """Columns that the real stages of each consumer have written for some rows."""
        self.engine_of: dict[Any, PlayedEngine] = {}
        self.ending: list[tuple[float, int, PlayedEngine, LeasedRows]] = []
        """A heap of leases by the time at which their rows end, and by number."""
        self.poller, context = zmq.Poller(), zmq.Context()
        for number, holder in enumerate(arguments["holders"]):
            if number % (SOCKETS // 2) == 0:
                context = zmq.Context()
            sockets = [asking_socket(context, arguments["queue"], arguments["secret"]) for _ in range(2)]
            seconds = SPREAD_S * (number + 1) / len(arguments["holders"])
            engine = PlayedEngine(holder, seconds, sockets[0], sockets[1])
            for socket in sockets:
                self.engine_of[socket] = engine
                self.poller.register(socket, zmq.POLLIN)
            engine.ask(engine.reports, Hello(self.data.address, generates=True))

    def serve(self) -> None:
        """Answer until every engine has received the order to stop."""
        while not all(engine.ends for engine in self.engine_of.values()):
            next_s = self.ending[0][0] - time.monotonic() if self.ending else 1.0
            for socket, _ in self.poller.poll(round(max(0.0, next_s) * 1000)):
                first, *rest = socket.recv_multipart(copy=False)
                engine = self.engine_of[socket]
                number, packed = unpack_message(first.buffer, tuple[int, Packed])
                latest, request = engine.asked[socket]
                if number == latest:
                    answer = unpack_message(packed, request.answer | Waited | RefusedRequest)
                    assert not isinstance(answer, RefusedRequest), answer
                    self._answered(engine, request, answer, [frame.buffer for frame in rest])
            while self.ending and self.ending[0][0] <= time.monotonic():
                self._report(*heappop(self.ending)[2:])

    def _answered(self, engine: PlayedEngine, request: QueueRequest, answer: Any, frames: Sequence[Frame]) -> None:
        if isinstance(request, Hello):
            self._take(engine)
        elif not isinstance(request, TakeWork):
            return
        elif isinstance(answer, Stop):
            engine.ends = True
        else:
            if isinstance(answer, Lost):
                engine.held.difference_update(answer.lost)
            if isinstance(answer, LoadWeights):
                engine.version = answer.version
                engine.ask(engine.reports, Loaded(answer.version))
            if isinstance(answer, LeasedRows):
                self._generate(engine, answer, decode([bytes(f) for f in frames]) if frames else Rows({}))
            self._take(engine)

    def _take(self, engine: PlayedEngine) -> None:
        settings, held = self.config.streaming, sorted(engine.held)
        request = TakeWork(self.consumers, settings.dispatch_rows, held=held, slots=GROUPS * SAMPLES)
        engine.ask(engine.takes, request, wait_s=settings.wait_s)

    def _generate(self, engine: PlayedEngine, leased: LeasedRows, inline: Rows) -> None:
        """Report the rows of a lease as generated and checked when their time has come."""
        if leased.consumer not in self.columns:
            self.columns[leased.consumer] = self._computed(leased, inline)
        heappush(self.ending, (time.monotonic() + engine.generates_s, leased.lease, engine, leased))

    def _report(self, engine: PlayedEngine, leased: LeasedRows) -> None:
        computed = self.columns[leased.consumer]
        columns = dict(computed.take(torch.arange(leased.size) % len(computed)).items())
        columns["version"] = torch.full((leased.size,), engine.version)
        part, described = write_columns(self.data, columns), list[Frame]()
        message, whole = part.message(described), list(range(leased.size))
        rows = [(leased.lease, whole)]
        report = {"stage": leased.consumer, "seconds": 0.0, "sums": {}}
        engine.ask(engine.reports, Ended([(leased.lease, leased.size)]))
        engine.ask(engine.reports, Done(leased.consumer, rows, [(message, rows)], [report]), described)

    def _computed(self, leased: LeasedRows, inline: Rows) -> Rows:
        """Return the columns that a real engine and its checks write for the rows of a lease."""
        flow, arguments = build_flow(self.config), self.arguments
        prepared = Prepared(self.config, flow, evaluation_flow(self.config, flow), load_tokenizer(self.config.model))
        ranks, role = OneOf(), arguments["group"]["role"]
        executor = StageExecutor(prepared, [], Progress(bars=False), [role], ranks, training=False)
        rows = assembled(self.data, inline, leased.payload, leased.size)
        written: dict[str, Any] = {}
        consumers = Consumers(flow).by_name | Consumers(prepared.evaluation).by_name
        for stage in consumers[leased.consumer].stages:
            new = dict(executor.run(stage, rows.with_columns(written), Sums()))
            written |= new
        executor.close()
        return Rows(written)


# A run


def play(folder: Path, devices: int) -> dict[str, Any]:
    """Simulate a run on this many devices; return the median step of each real process and of the controller."""
    program.QueueServer = CountingServer  # type: ignore[misc]
    program.LocalLauncher = PlayedLauncher  # type: ignore[misc]
    each = devices // 2
    write_sums(folder / "lines.jsonl", 8 * each)
    start = time.process_time()
    run = CountedRun(config_of(folder, devices), counters)
    with run:
        started = time.process_time() - start
        run.train()
    parts = {f"controller, {part}": counts for part, counts in run.parts(WARM).items()}
    parts |= parts_of_processes(run.folder, "checkpoint")
    before = time.process_time()
    with CountedRun(config_of(folder, devices, STEPS + 1), counters, resume=run.folder):
        parts["controller, resume"] = {"seconds": time.process_time() - before}
    parts |= {name: each for name, each in parts_of_processes(run.folder, "resume").items() if name not in parts}
    return {"devices": devices, "rows": GROUPS * SAMPLES * each, "start_s": started, "parts": parts}


def parts_of_processes(folder: Path, order: str) -> dict[str, dict[str, float]]:
    """Return the median step of each process, and its seconds for an order to save or to load."""
    parts = dict[str, dict[str, float]]()
    for path in sorted(folder.glob("played-*")):
        name, marks = path.stem.removeprefix("played-"), json.loads(path.read_text())
        orders = [{"seconds": mark[order]} for mark in marks if order in mark]
        steps = [mark for mark in marks if not {"checkpoint", "resume"} & set(mark)]
        steps = [{key: after[key] - before[key] for key in after} for before, after in pairwise(steps)]
        parts |= {name: median(steps[WARM:] or steps)} if steps else {}
        parts |= {f"{name}, {order}": median(orders)} if orders else {}
    return parts

"""A small flow whose stages only pass numbers on, and a queue that serves it, in this process or in one of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import decode, encode
from braidrl.data.messages import Frame, Message, pack_message
from braidrl.data.rows import Objects, Rows, Uid
from braidrl.flow import Flow, Kind, Scope, Stage
from braidrl.flow.batches import Sizes
from braidrl.queue.calls import NOTHING, Answer, QueueRequest
from braidrl.queue.client import Client, DataPlane, WorkItem, write_columns
from braidrl.queue.owner import StorageNode
from braidrl.queue.table import StoredRows, TablePiece
from braidrl.queue.transport import QueueServer
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import LeasedRows, Loaded, LoadWeights, Step, Stepped, TakeWork, WorkerRequest
from braidrl.weights.versions import LoadingSchedule

SAMPLES = 2
LOADED: dict[str, int] = {}
"""Versions loaded by each worker that plays an engine."""


def stage(name: str, kind: Kind, reads: Sequence[str], writes: Sequence[str] = (), scope: Scope = Scope.ROW) -> Stage:
    role = {Kind.TRAIN: "actor", Kind.GENERATE: "actor", Kind.INFER: "judge"}.get(kind)
    return Stage(name, name, role, kind=kind, reads=tuple(reads), writes=tuple(writes), scope=scope)


GENERATE = stage("generate", Kind.GENERATE, ("prompt",), ("tokens", "length", "version"))
CHECK = stage("check", Kind.INFER, ("tokens",), ("reward",))
"""Has workers of its own, as a reward model."""
NORMALISE = stage("normalise", Kind.COMPUTE, ("reward",), ("advantage",), Scope.GROUP)
UPDATE = stage("update", Kind.TRAIN, ("tokens", "advantage"))
FLOW = Flow("made-up", [GENERATE, CHECK, NORMALISE, UPDATE])


def born(groups: Sequence[int]) -> Rows:
    """Make rows of some groups; the prompt of group 7 is 7, 7, ... of 7 + 1 tokens."""
    numbers = [group for group in groups for _ in range(SAMPLES)]
    return Rows(
        {
            "source": torch.zeros(len(numbers), dtype=torch.int64),
            "group": torch.tensor(numbers, dtype=torch.int64),
            "sample": torch.arange(SAMPLES).repeat(len(groups)),
            "prompt": Ragged.from_rows([torch.full((group % 50 + 1,), group) for group in numbers], torch.int64),
            "metadata": Objects(tuple({"group": group} for group in numbers)),
        }
    )


def admit(control: ControlPlane, groups: Sequence[int]) -> None:
    """Puts the rows of some groups into the queue."""
    control.admit(control.training, control.held.hold_for(write_columns(control.data, dict(born(groups).items()))))


def made_from(name: str, rows: Rows, version: int = 0) -> dict[str, Any]:
    """Compute a stage's columns: a function of the rows, so that a reader can check them."""
    if name == "generate":
        tokens = rows["prompt"].with_values(rows["prompt"].values * 2)
        return {"tokens": tokens, "length": tokens.lengths, "version": torch.full((len(rows),), version)}
    if name == "check":
        return {"reward": rows["tokens"].row_sums().float() + rows["sample"]}
    return {"advantage": rows["reward"] - rows["reward"].mean()}


class Admit(QueueRequest):
    """Rows from a process of its own, which in a run the main program admits."""

    payload: list[TablePiece]


class AdmittingPlane(ControlPlane):
    """Admits rows on request."""

    def respond(self, request: WorkerRequest | Admit, frames: Sequence[Frame]) -> Answer | None:
        """Admit rows, and open a batch if possible. Refuse known groups with ValueError."""
        if not isinstance(request, Admit):
            return super().respond(request, frames)
        self.training.schedule.admission.groups_wanted(self.loading.target)
        self.training.admit(StoredRows(decode([bytes(frame) for frame in frames]), request.payload))
        return NOTHING


@contextmanager
def queue(
    flow: Flow = FLOW,
    iterations: int = 3,
    prompts: int = 2,
    lease_s: float = 30.0,
    staleness: int = 0,
    host: str = "here",
    loading: LoadingSchedule | None = None,
) -> Iterator[tuple[ControlPlane, QueueServer, StorageNode]]:
    """A queue that serves a flow from a thread of this process."""
    node = StorageNode(host, "127.0.0.1")
    LOADED.clear()
    sizes = Sizes(iterations, prompts, SAMPLES, prompts * SAMPLES, max_staleness=staleness)
    control = AdmittingPlane(Stream(flow, sizes), node.data, lease_s, loading=loading)
    server = QueueServer(control.handle, WorkerRequest | Admit, control.tick)
    try:
        yield control, server, node
    finally:
        server.close()
        node.close()
    assert server.failure is None, server.failure


def client(server: QueueServer, node: StorageNode, name: str, generates: bool = False) -> Client:
    return Client(server.address, name, DataPlane(node.place(), name, 10.0), generates)


def deliver(worker: Client, work: WorkItem, columns: Mapping[str, Any], **more: Any) -> list[int]:
    """Write columns of all rows of a lease, and report these as done; the leases that are lost."""
    written = [(write_columns(worker.data, columns), [(work.lease, list(range(work.size)))])] if columns else []
    return worker.done(work.consumer, [(work.lease, None)], written, **more)


class Worker:
    """A worker of every kind; as a trainer it keeps the rows of its batch."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.kept: list[WorkItem] = []
        self.trained: list[Uid] = []

    def once(
        self, consumers: Sequence[str] = ("train.actor", "check", "generate"), wait_s: float = 0.0
    ) -> type[Message]:
        """Does the next thing; its kind."""
        rows = sum(work.size for work in self.kept)
        ready = ["update"] if self.kept and rows == self.kept[0].answer.batch.batch_rows else []
        role = "actor" if "train.actor" in consumers else None
        work = self.client.take(TakeWork(consumers, 8, role=role, ready=ready), wait_s)
        if work.kind is LeasedRows and work.consumer == "train.actor":
            self.kept.append(work)
        elif work.kind is LeasedRows:
            own = work.read()
            deliver(self.client, work, made_from(work.consumer, own, LOADED.get(self.client.holder, 0)))
        elif work.kind is Step:
            for kept in self.kept:
                self.trained += kept.read().uids()
            self.client.ask(Stepped(work.answer.stage, {}))
            for kept in self.kept:
                own = kept.read()
                deliver(self.client, kept, made_from("normalise", own) if "reward" in own else {})
            self.kept = []
        elif work.kind is LoadWeights:
            LOADED[self.client.holder] = work.answer.version
            self.client.ask(Loaded(work.answer.version))
        return work.kind

    def close(self) -> None:
        self.client.close()


def main_program(control: ControlPlane, server: QueueServer, iterations: int, limit_s: float = 60.0) -> list[Any]:
    """Admits what is wanted and lets steps be made until so many iterations are finished; those."""
    groups, seen, finished, deadline = 0, -1, [], time.monotonic() + limit_s
    control.steps.allow(iterations)
    while len(finished) < iterations:
        assert time.monotonic() < deadline, f"only {len(finished)} iterations came to their end"
        with control.changed:
            expected = control.training.schedule.admission.groups_wanted(control.loading.target)
        if expected:
            admit(control, range(groups, groups + expected))
            groups += expected
            server.changed()
        with control.changed:
            while control.finished:
                finished.append(control.finished.popleft())
        if not expected and len(finished) < iterations:
            seen = control.wait(seen, 0.1)
    return finished


def serve(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """A queue in a process of its own: tells its address, and runs until it is told to end."""
    with queue(iterations=arguments["iterations"], prompts=arguments["prompts"], lease_s=arguments["lease_s"]) as (
        control,
        server,
        node,
    ):
        control.steps.allow(arguments["iterations"])
        pipe.send_bytes(pack_message([server.address, node.place()]))
        pipe.recv_bytes()


def admit_over_the_wire(worker: Client, rows: Rows) -> None:
    put = write_columns(worker.data, dict(rows.items()))
    worker.ask(Admit(put.payload), encode(put.index))

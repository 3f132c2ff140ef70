"""The common parts of all streaming workers, and the loop of those that do not generate: one role's model, or compute stages.

The ranks of a role, in any layout, are one worker. The leader takes leases and orders; every rank does its share of a lease, by
the partition function, and the collective work of its layout; the leader acknowledges.

leader: take ──▶ share ──▶ each rank: its rows ──executor──▶ columns in shared memory, loss sums ──▶ gather ──▶ leader: done, stepped
                            thread:   its slices of the new weights ──▶ shared memory ──▶ each rank, in the leader's name: weights

A worker of a single process takes all rows of a lease itself, and nothing is gathered.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from braidrl.cluster.world import World
from braidrl.config import StreamingConfig
from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Rows, tokens_of
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import trained_on
from braidrl.flow.compute import dropped, summed, with_state
from braidrl.flow.flow import is_optimized
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.stalls import WORK
from braidrl.observe.trace import BusySpan, WorkerTrace
from braidrl.queue.client import Client, StreamLoader, WorkItem, write_columns
from braidrl.queue.storage import DataPlane, Evicted
from braidrl.queue.table import StoredPart
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.weights import Place, VersionWriter, source_of
from braidrl.training.objective import UpdateCounts
from braidrl.training.roles.copies import copied_parts, local_weight_parts
from braidrl.training.roles.make import torch_worker
from braidrl.weights.collective import Incoming, OfferedWeights

SOON_S = 0.2
"""Longest wait of a leader for work while other ranks wait for it."""


class LeaseProgress(Progress):
    """Reports progress to stall detection."""

    def __init__(self) -> None:
        super().__init__()
        self.on_advance: Callable[[], object] = lambda: None

    def advanced(self) -> None:
        """Record progress of this process."""
        self.on_advance()

    @contextmanager
    def stage(self, name: str, total_rows: int | None = None) -> Iterator[Bar]:
        """Return a bar that is not displayed."""
        yield Bar(name, total_rows, time.monotonic(), self.advanced)


@dataclass
class WorkerContext:
    """The parts and connections of one process of a group."""

    group: Group
    settings: StreamingConfig
    flow: Flow
    evaluation: Flow
    executor: StageExecutor
    data: DataPlane
    progress: LeaseProgress
    trace: WorkerTrace
    leader: str
    """Name of the worker at the queue."""
    queue: str
    """Address of the queue."""
    run: str
    """Name of the run's files on this node."""
    ip: str
    """This node's address."""

    def stage(self, name: str) -> Stage:
        """Return a stage of the flow, or of the evaluation's flow."""
        return next(stage for stage in (*self.flow.stages, *self.evaluation.stages) if stage.name == name)

    def keep_leases(self, client: Client) -> None:
        """Send the queue heartbeats while this worker computes."""
        self.progress.on_advance = lambda: client.renew(self.settings.lease_s / 3)


class StageLoop:
    """One rank; the leader has a client."""

    def __init__(self, context: WorkerContext, world: World, client: Client | None) -> None:
        self.context, self.world, self.client = context, world, client
        self.losses: dict[str, dict[str, float]] = {}
        """Loss sums of the update in progress, by train stage."""
        self.writing = BackgroundWriter()
        self.exports = BackgroundWriter("new weights")
        """Writes this rank's share of a version while the next rows are trained on; no step may change the weights meanwhile."""
        self.versions: VersionWriter | None = None
        self.asked: int | None = None
        """The order that waits for the result of the write."""

    @property
    def role(self) -> str:
        """Return the role whose model is here."""
        return str(self.context.group.role)

    @property
    def _divided(self) -> bool:
        return self.world.size > 1 and self.context.executor.workers[self.role].ranks.forward_is_collective

    def lead(self) -> None:
        """Take work until the run ends, for all ranks."""
        assert self.client is not None
        settings, stages = self.context.settings, self.context.group.stages
        self.context.keep_leases(self.client)
        whole = [name for name in stages if self._needs_whole_updates(self.context.stage(name))]
        most = settings.dispatch_rows * self.world.size
        stream = StreamLoader(self.client, stages, most, settings.wait_s, whole, self.world.size)
        with self.exports:
            for work in stream:
                # Also without work, as a heartbeat of the leader for the others.
                self._together(work)
                if self.asked is not None and not self.writing.goes_on:
                    self._together(WorkItem("written", self.context.data, {}, Rows({})))
                is_heard_soon = self.asked is not None or self.exports.goes_on
                stream.wait_s = min(SOON_S, settings.wait_s) if is_heard_soon else settings.wait_s
        self._broadcast(msgpack.packb([{"kind": "stop"}, []]))

    def follow(self) -> None:
        """Execute the leader's work until the run ends."""
        with self.exports:
            while (work := unpacked(self._broadcast(), self.context)).kind != "stop":
                self._do(work)

    def _together(self, work: WorkItem) -> None:
        """Do a piece of work with all ranks."""
        if self.world.size > 1:
            self._broadcast(packed(work))
        self._do(work)

    def _broadcast(self, message: bytes = b"") -> bytes:
        """Broadcast the leader's message."""
        return bytes(self.world.gather("the leader's word", message)[0])

    def _needs_whole_updates(self, stage: Stage) -> bool:
        return is_optimized(stage) and self.context.executor.objective(stage).needs_group_tokens

    def _do(self, work: WorkItem) -> None:
        place = str(work.message.get("stage", work.kind))
        self.world.at(place)
        self.exports.check()
        with WORK.on(f"{place} ({work.kind})"):
            self._act(work)

    def _act(self, work: WorkItem) -> None:
        if work.kind == "rows":
            stage = self.context.stage(work.stage)
            act = {Kind.TRAIN: self._forward_backward, Kind.SELECT: self._select}.get(stage.kind, self._forward)
            act(stage, work)
        elif work.kind == "step":
            self._optim_step(self.context.stage(work.stage), work)
        elif work.kind == "give":
            self._give(work)
        elif work.kind == "order":
            self._obey(work.message)
        elif work.kind == "written":
            self._report_writing()

    def _own_places(self, index: Rows) -> list[int]:
        """Return the positions of this rank's rows in a lease."""
        if self.world.size == 1:
            return list(range(len(index)))
        lengths = index["length"].tolist() if "length" in index else [1.0] * len(index)
        return balanced_partition(lengths, self.world.size)[self.world.rank]

    def _busy(self, stage: Stage, work: WorkItem, places: Sequence[int]) -> AbstractContextManager[BusySpan]:
        """Trace a piece of work on these rows, under the version of the weights; a frozen role has none."""
        uids = work.index.uids() if len(places) else []
        version = trained_on(work.iteration) if self.context.group.trained else None
        return self.context.trace.busy(stage.name, work.iteration, [uids[place] for place in places], version)

    def _done(
        self, stage: Stage, work: WorkItem, written: Sequence[StoredPart], report: dict[str, Any],
        totals: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        if self.client is not None:
            self.client.done(stage.name, [number for number, _ in work.leases], written, report, totals)

    def _forward(self, stage: Stage, work: WorkItem) -> None:
        """Compute the columns of an infer or compute stage for the rows of a lease."""
        stage, places = with_state(stage, work.message["state"]), self._own_places(work.index)
        written: list[StoredPart] = []
        totals: dict[str, float] = {}
        with self._busy(stage, work, places) as span:
            rows = self._rows(stage, work, places)
            columns = self.context.executor.run(stage, rows, span.sums) if rows is not None else {}
            span.tokens = tokens_of(rows) if rows is not None else 0
            if columns and rows is not None:
                written.append(write_columns(self.context.data, rows.uids(), columns))
                totals = {name: float(total) for name, total in summed(stage, rows).items()} if stage.state else {}
        if self.world.size > 1:
            parts = self.world.gather("columns", packed_part(written[0]) if written else b"")
            written = [unpacked_part(stage.name, part) for part in parts if len(part)]
        self._done(stage, work, written, span.report(), totals)

    def _rows(self, stage: Stage, work: WorkItem, places: Sequence[int]) -> Rows | None:
        """Return this rank's rows of a lease; None if one is gone, here or on a rank that computes together with this one.

        If selection has dropped a group meanwhile, its rows are gone, and so is the lease.
        """
        rows: Rows | None = None
        with suppress(Evicted):
            rows = work.rows(places) if places else Rows({})
        if self.world.size > 1 and self.context.executor.is_collective(stage):
            there = self.world.gather("who has the rows", b"\0" if rows is None else b"\1")
            return rows if all(part[0] for part in there) else None
        return rows

    def _select(self, stage: Stage, work: WorkItem) -> None:
        assert self.client is not None, "verdicts come from processes that share no lease"
        with self._busy(stage, work, range(len(work.index))) as span:
            gone = dropped(stage, work.index)
            reasons = {group: gone.get(group) for group in dict.fromkeys(work.index["group"].tolist())}
        self.client.selected(stage.name, work.leases[0][0], reasons, span.report())

    def _forward_backward(self, stage: Stage, work: WorkItem) -> None:
        places = self._own_places(work.index)
        losses: dict[str, float] = {}
        with self._busy(stage, work, places) as span:
            # Ranks that shard the model meet also if one has no row.
            if places or self._divided:
                bar = Bar(stage.name, len(places), 0.0, self.context.progress.advanced)
                rows = work.rows(places) if places else Rows({})
                span.tokens = tokens_of(rows)
                _, rows = self.context.executor.update(stage, work.index, rows)
                losses = self.context.executor.forward_backward(stage, rows, span.sums, bar)
        totals = self.losses.setdefault(stage.name, {})
        for found in self._gathered(losses, span):
            for name, loss in found.items():
                totals[name] = totals.get(name, 0.0) + loss
        self._done(stage, work, [], span.report())

    def _gathered(self, losses: dict[str, float], span: BusySpan) -> list[dict[str, float]]:
        """Gather the loss sums of all ranks, and add all metric sums to the span."""
        parts = self.world.gather("loss sums", msgpack.packb([losses, span.sums.pairs()]))
        found = [msgpack.unpackb(part) for part in parts]
        span.sums = Sums.merged(Sums(pairs) for _, pairs in found)
        return [own for own, _ in found]

    def _optim_step(self, stage: Stage, work: WorkItem) -> None:
        self.exports.wait()
        with self._busy(stage, work, ()) as span:
            if is_optimized(stage):
                # Every rank has the global sums: the first one reports them.
                losses, first = self.losses.pop(stage.name, {}), self.world.first
                counts = UpdateCounts.of(work.index)
                self.context.executor.optim_step(
                    stage, losses if first else {}, counts, work.iteration, span.sums, counted=first
                )
                self._gathered({}, span)
            else:
                self._copy_role(stage, work)
        if self.client is not None:
            self.client.ask("stepped", stage=stage.name, report=span.report())
        if self.versions is not None:
            self.versions.forget(work.message["outdated"])
        if work.message["export"] is not None:
            self._begin_export(work.message["export"])

    def _copy_role(self, stage: Stage, work: WorkItem) -> None:
        """Move the role's weights towards those of another role, which its ranks have published."""
        worker, name = torch_worker(self.context.executor.workers[self.role]), str(stage.params["source"])
        parts = copied_parts(worker, name, stage.params.get("decay", 0.0))
        source = source_of(work.message["weights"])
        try:
            if isinstance(source, OfferedWeights):
                # Each rank receives the slices that it holds.
                with ExitStack() as asked:
                    notice = asked.enter_context(source.asked(self.world.size)) if self.world.first else None
                    notice = self.world.share("weights on offer", notice)
                    Incoming(notice, self.world.rank, worker.device).receive(parts)
            else:
                source.put_into(parts)
        except ValueError as error:
            raise UserError(f"{self.role} cannot take weights from {name}: {error}") from error
        # They are freed after the leader reports the step: by then every rank has them.
        self.world.gather("weights of another role", b"")

    def _give(self, work: WorkItem) -> None:
        """Publish the role's weights for the update of another role that asked for them."""
        place = self._versions().begin()()
        self.world.gather("weights are there", b"")
        if self.client is not None:
            self.client.ask("given", stage=work.stage, place=place)

    def _obey(self, order: Mapping[str, Any]) -> None:
        """Save or load a checkpoint, or start to write one, with all ranks; the leader reports the result."""
        executor, writes = self.context.executor, self.world.first
        if order["do"] == "load":
            self.exports.wait()
            executor.load(Path(order["folder"]))
            if order["version"] is not None:
                # Engines may be ordered to load it at once.
                self._begin_export(order["version"])
                self.exports.wait()
                self.world.gather("weights are there", b"")
        elif order["do"] == "save":
            executor.save(Path(order["folder"]), writes)
        elif order["do"] == "copy":
            self.writing.begin(executor.copy_for_saving(Path(order["folder"]), writes))
        else:
            # Not before it is written.
            self.asked = order["order"]
            return
        if self.client is not None:
            self.client.ask("ordered", order=order["order"], result={})

    def _report_writing(self) -> None:
        """Report the result of the write on all ranks."""
        troubles = [
            bytes(part).decode() for part in self.world.gather("what is written", self.writing.trouble().encode())
        ]
        if self.client is not None:
            self.client.ask("ordered", order=self.asked, result={"trouble": next(filter(None, troubles), "")})
        self.asked = None

    def _begin_export(self, version: int) -> None:
        """Start to publish this version while the next rows are trained on."""
        versions, start = self._versions(), time.monotonic()
        self.exports.begin([partial(self._publish, version, versions.begin(), start)])

    def _publish(self, version: int, publish: Callable[[], Place], start: float) -> None:
        """Publish with the other ranks; the first reports the version's location to the queue, in the leader's name."""
        place = publish()
        if not self.world.first:
            return
        told = {
            "request": "weights", "holder": self.context.leader, "role": self.role, "version": version,
            "place": place, "seconds": time.monotonic() - start,
        }  # fmt: skip
        self.context.data.connections.ask(self.context.queue, told)

    def _versions(self) -> VersionWriter:
        if self.versions is None:
            worker, context = torch_worker(self.context.executor.workers[self.role]), self.context
            parts = partial(local_weight_parts, worker)
            self.versions = VersionWriter(
                self.role, parts, self.world, context.executor.config, context.run, context.ip
            )
        return self.versions


def packed(work: WorkItem) -> bytes:
    """Encode a piece of work for the other ranks: the queue's answer, and the index columns."""
    frames = [bytes(frame) for frame in encode(work.index)] if len(work.index) else []
    answer: bytes = msgpack.packb([dict(work.message) | {"kind": work.kind}, frames])
    return answer


def unpacked(message: bytes, context: WorkerContext) -> WorkItem:
    """Decode a piece of work."""
    answer, frames = msgpack.unpackb(message)
    return WorkItem(answer["kind"], context.data, answer, decode(frames) if frames else Rows({}))


def packed_part(part: StoredPart) -> bytes:
    """Encode the location of a rank's columns, for the leader to acknowledge."""
    frames: list[Frame] = []
    result: bytes = msgpack.packb([part.message(frames), [bytes(frame) for frame in frames]])
    return result


def unpacked_part(stage: str, packed: Frame) -> StoredPart:
    """Decode the location of a rank's columns."""
    message, frames = msgpack.unpackb(packed)
    return StoredPart.received(stage, message, frames)

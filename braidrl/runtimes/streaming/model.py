"""The loop of the processes that hold one role's model: inference, gradients, optimizer steps.

The leader takes leases and orders; every rank does its part of a lease, by the partition function; the leader acknowledges.

leader: take ──▶ share ──▶ each rank: its rows ──▶ columns in shared memory, loss sums ──▶ gather ──▶ leader: done, stepped
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from braidrl.cluster.world import World
from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.partition import balanced_partition
from braidrl.data.rows import Rows
from braidrl.flow import Kind, Stage
from braidrl.flow.flow import is_optimized
from braidrl.flow.readiness import Uid
from braidrl.flow.updates import trained_on
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.runtimes.streaming.weights import export, received
from braidrl.runtimes.streaming.worker import WorkerContext
from braidrl.transfer.queue.client import Client, StreamLoader, WorkItem, write_columns
from braidrl.transfer.queue.storage import Evicted
from braidrl.transfer.queue.table import StoredPart

SOON_S = 0.2
"""How long a leader waits for work at most while others wait for what it writes."""


class ModelLoop:
    """One rank; the leader has a client."""

    def __init__(self, context: WorkerContext, world: World, client: Client | None) -> None:
        self.context, self.world, self.client = context, world, client
        self.losses: dict[str, dict[str, float]] = {}
        """Of each train stage the loss sums of the update that is being accumulated."""
        self.writing = BackgroundWriter()
        self.asked: int | None = None
        """The order to tell how writing has ended."""

    def lead(self) -> None:
        """Take what there is until the run ends, for all ranks."""
        assert self.client is not None
        client, settings = self.client, self.context.settings
        self.context.progress.on_advance = lambda: client.renew(settings.lease_s / 3)
        whole = [name for name in self.context.group.stages if self._needs_whole_updates(self.context.stage(name))]
        most = settings.dispatch_rows * self.world.size
        stream = StreamLoader(client, self.context.group.stages, most, settings.wait_s, whole, self.world.size)
        for work in stream:
            # Also when there is nothing to do: so the others know that the leader lives.
            self._told(packed(work))
            self._do(work)
            self._tell_of_writing()
            stream.wait_s = settings.wait_s if self.asked is None else min(SOON_S, settings.wait_s)
        self._told(msgpack.packb([{"kind": "stop"}, []]))

    def follow(self) -> None:
        """Do what the leader says until the run ends."""
        while (work := unpacked(self._told(), self.context)).kind != "stop":
            self._do(work)

    def _told(self, message: bytes = b"") -> bytes:
        """What the leader says, on every rank."""
        return bytes(self.world.gather("the leader's word", message)[0])

    def _needs_whole_updates(self, stage: Stage) -> bool:
        return is_optimized(stage) and self.context.executor.objective(stage).needs_group_tokens

    def _do(self, work: WorkItem) -> None:
        self.world.at(str(work.message.get("stage", work.kind)))
        if work.kind == "rows":
            stage = self.context.stage(work.stage)
            (self._forward_backward if stage.kind is Kind.TRAIN else self._forward)(stage, work)
        elif work.kind == "step":
            self._optim_step(self.context.stage(work.stage), work)
        elif work.kind == "give":
            self._give(work)
        elif work.kind == "order":
            self._obey(work.message)

    def _own_places(self, index: Rows) -> list[int]:
        """The places of this rank's rows in a lease."""
        if self.world.size == 1:
            return list(range(len(index)))
        lengths = index["length"].tolist() if "length" in index else [1.0] * len(index)
        return balanced_partition(lengths, self.world.size)[self.world.rank]

    def _version(self, work: WorkItem) -> int | None:
        """The version of the weights that are used; a frozen role's have none."""
        return trained_on(work.iteration) if self.context.group.trained else None

    def _uids(self, index: Rows, places: Sequence[int]) -> list[Uid]:
        uids = index.uids()
        return [uids[place] for place in places]

    def _forward(self, stage: Stage, work: WorkItem) -> None:
        places = self._own_places(work.index)
        with self.context.busy(stage.name, work.iteration, self._uids(work.index, places), self._version(work)) as span:
            written = b""
            # Rows of a group that selection has dropped meanwhile are gone, and the lease with them.
            with suppress(Evicted):
                if places:
                    rows = work.rows(places)
                    columns = self.context.executor.run(stage, rows, span.sums)
                    written = packed_part(write_columns(self.context.data, rows.uids(), columns))
        parts = self.world.gather("columns", written)
        if self.client is not None:
            found = [unpacked_part(stage.name, part) for part in parts if len(part)]
            self.client.done(stage.name, [number for number, _ in work.leases], found, span.report())

    def _forward_backward(self, stage: Stage, work: WorkItem) -> None:
        places = self._own_places(work.index)
        with self.context.busy(stage.name, work.iteration, self._uids(work.index, places), self._version(work)) as span:
            losses: dict[str, float] = {}
            if places:
                bar = Bar(stage.name, len(places), 0.0, self.context.progress.advanced)
                rows = work.rows(places)
                losses = self.context.executor.forward_backward(stage, work.index, rows, span.sums, bar)
        parts = [
            msgpack.unpackb(part) for part in self.world.gather("loss sums", msgpack.packb([losses, span.sums.pairs()]))
        ]
        totals = self.losses.setdefault(stage.name, {})
        for found, _ in parts:
            for name, loss in found.items():
                totals[name] = totals.get(name, 0.0) + loss
        span.sums = Sums.merged(Sums(pairs) for _, pairs in parts)
        if self.client is not None:
            self.client.done(stage.name, [number for number, _ in work.leases], [], span.report())

    def _optim_step(self, stage: Stage, work: WorkItem) -> None:
        with self.context.busy(stage.name, work.iteration, version=self._version(work)) as span:
            if is_optimized(stage):
                losses = self.losses.pop(stage.name, {})
                self.context.executor.optim_step(stage, losses, work.index, work.iteration, span.sums)
            else:
                self.context.executor.copy_weights(stage, received(work.message["weights"], self.context.data))
                # The weights are freed once the leader says that the step is made: by then every rank must have them.
                self.world.gather("weights of another role", b"")
        if self.client is not None:
            version = self.client.ask("stepped", stage=stage.name, report=span.report())[0]["export"]
            if version is not None:
                self._export(version)

    def _give(self, work: WorkItem) -> None:
        """Hands the role's weights to the update of another role that asked for them."""
        if self.client is not None:
            blocks = export(
                dict(self.context.executor.workers[str(self.context.group.role)].tensors()), self.context.data
            )
            self.client.ask("given", stage=work.stage, blocks=blocks)

    def _obey(self, order: Mapping[str, Any]) -> None:
        """Saves or loads a checkpoint, or begins to write one; the leader says when it is done."""
        if order["do"] == "load":
            self.context.executor.load(Path(order["folder"]))
            if self.client is not None and order["version"] is not None:
                self._export(order["version"])
        elif self.client is None:
            return
        elif order["do"] == "save":
            self.context.executor.save(Path(order["folder"]))
        elif order["do"] == "copy":
            self.writing.begin(self.context.executor.copy_for_saving(Path(order["folder"])))
        else:
            # Not before it is written.
            self.asked = order["order"]
            return
        if self.client is not None:
            self.client.ask("ordered", order=order["order"], result={})

    def _tell_of_writing(self) -> None:
        """Says how writing has ended, once it has and somebody asked."""
        assert self.client is not None
        if self.asked is not None and not self.writing.goes_on:
            self.client.ask("ordered", order=self.asked, result={"trouble": self.writing.trouble()})
            self.asked = None

    def _export(self, version: int) -> None:
        assert self.client is not None and self.context.group.role
        blocks = export(dict(self.context.executor.workers[self.context.group.role].tensors()), self.context.data)
        self.client.ask("weights", role=self.context.group.role, version=version, blocks=blocks)


def packed(work: WorkItem) -> bytes:
    """Return a piece of work as the other ranks get it: what the queue said, and the index columns."""
    frames = [bytes(frame) for frame in encode(work.index)] if len(work.index) else []
    answer: bytes = msgpack.packb([dict(work.message) | {"kind": work.kind}, frames])
    return answer


def unpacked(message: bytes, context: WorkerContext) -> WorkItem:
    """Return the piece of work that `packed` was given."""
    answer, frames = msgpack.unpackb(message)
    return WorkItem(answer["kind"], context.data, answer, decode(frames) if frames else Rows({}))


def packed_part(part: StoredPart) -> bytes:
    """Return where a rank's columns lie, for the leader to acknowledge."""
    frames: list[Frame] = []
    result: bytes = msgpack.packb([part.message(frames), [bytes(frame) for frame in frames]])
    return result


def unpacked_part(stage: str, packed: Frame) -> StoredPart:
    """Return what `packed_part` was given."""
    message, frames = msgpack.unpackb(packed)
    return StoredPart.received(stage, message, frames)

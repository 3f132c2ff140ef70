"""The common parts of all streaming workers, and the loop of those that do not generate.

The ranks of a role, in any layout, are one worker. The leader takes leases and orders; every rank does its share of a
lease, by the partition function, and the collective work of its layout; the leader reports.

leader: take ─▶ share ─▶ each rank: its rows ──executor──▶ columns in shared memory, loss sums ──▶ gather
    ──▶ leader: done, stepped
                          thread:   its slices of the new weights ──▶ shared memory
                              ──▶ each rank, in the leader's name: weights

Rows of a frozen role pass through; rows of a trained role stay with its `Trainer` until the batch is trained.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from braidrl.cluster.world import Ranks, World
from braidrl.config import Config, StreamingConfig
from braidrl.data.codec import decode, encode
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.packing import part_numbers
from braidrl.data.rows import Rows, tokens_of
from braidrl.errors import LostPeers, UserError, first_line
from braidrl.flow import Stage
from braidrl.flow.flow import is_optimized
from braidrl.observe.stalls import WORK
from braidrl.observe.trace import Span, WorkerTrace
from braidrl.queue.calls import Done, GiveBack, Stop
from braidrl.queue.client import Client, DataPlane, Evicted, WorkItem, assembled, write_columns
from braidrl.queue.table import Positions, StoredRows
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.run_data import with_data
from braidrl.runtimes.prepare.setup import without_data
from braidrl.runtimes.replicas import Replica
from braidrl.runtimes.row_store import RowStore
from braidrl.runtimes.saving.checkpoints import BackgroundWriter
from braidrl.runtimes.streaming.consumers import Consumer
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.train import Trainer
from braidrl.runtimes.streaming.weights import VersionWriter, source_of
from braidrl.runtimes.streaming.work import (
    Broadcast,
    Give,
    GoBack,
    LeasedRows,
    LoadCheckpoint,
    MakeRows,
    NewWeights,
    Order,
    OrderDone,
    ReportWrite,
    Save,
    Step,
    Stepped,
    TakeWork,
    WeightsGiven,
    WriteRows,
    Written,
    WrittenColumns,
)
from braidrl.training.backends import ShardedBackend
from braidrl.training.roles.copies import copied_parts
from braidrl.training.roles.worker import torch_worker
from braidrl.training.row_costs import balance_of

SOON_S = 0.2
"""Longest wait of a leader for work while other ranks wait for it."""


@dataclass
class WorkerContext:
    """The parts and connections of one process of a group."""

    group: Group
    settings: StreamingConfig
    consumers: Mapping[str, Consumer]
    """The consumers of the flow, and of the evaluation's flow."""
    executor: StageExecutor
    data: DataPlane
    trace: WorkerTrace
    leader: str
    """Name of the worker at the queue."""
    queue: str
    """Address of the queue."""
    run: str
    """Name of the run's files on this node."""
    ip: str
    """This node's address."""


class TrainerState:
    """The state of the trained role on this rank, over all memberships of its ranks."""

    def __init__(self, world: World, executor: StageExecutor, replica: Replica, is_copied: bool) -> None:
        self.world, self.executor, self.replica = world, executor, replica
        self.is_copied = is_copied and world.elastic is not None
        """True if its state is copied in memory."""
        self.is_new = False
        """True while the models have no state of the run: in a process that has joined the ranks, and after the models
        were made anew for the present ranks.
        """
        self.copies_early = False
        """True if a version is copied as soon as it is trained, because one rank alone may have a part of it."""
        self.changed_at: float | None = None
        """The time at which the ranks last began to regroup; None if they never did."""

    def keep(self, version: int) -> None:
        """Copy the state that training after a published version will change."""
        if self.is_copied:
            self.replica.keep(version, self.executor)

    def go_back(self, version: int) -> bool:
        """Restore the state of a version on all ranks; return False if a part of it is on no rank.

        All ranks call this together.
        """
        # A role that was not trained since has its copies under an earlier version.
        steps = [step for step in self.replica.copies if step <= version] if self.copies_early else []
        is_whole = self.replica.restore(max(steps, default=version), self.executor, not self.is_new)
        if is_whole:
            self.executor.regroup()
        if is_whole and self.copies_early:
            self.replica.copy_again(version, self.executor)
        else:
            self.replica.copies.clear()
        self.is_new = self.is_new and not is_whole
        # The leader reports this for all.
        self.world.meet("ranks that have gone back")
        return is_whole

    def load(self, folder: Path) -> None:
        """Load a checkpoint in place of any state. All ranks call this together."""
        self.executor.load(folder)
        self.replica.copies.clear()
        self.is_new = False


class StageLoop:
    """One of the current ranks; only the leader has a client."""

    def __init__(self, context: WorkerContext, world: World, client: Client | None, state: TrainerState) -> None:
        self.context, self.world, self.client, self.state = context, world, client, state
        self.role = str(context.group.role)
        """The role whose model is here."""
        self.most = context.settings.dispatch_rows * world.size
        """Limit of the rows of a lease."""
        consumers = [context.consumers[name] for name in context.group.consumers]
        trained = next((consumer for consumer in consumers if consumer.updates), None)
        self.trainer: Trainer | None = None
        if trained is not None:
            parts = context.executor, context.trace, context.data
            self.trainer = Trainer(trained, *parts, world, self.most, state.keep)
        self.writing = BackgroundWriter()
        self.exports = BackgroundWriter("new weights")
        """Writes this rank's share of a version while the next rows are trained on; no step may change the weights
        meanwhile.
        """
        self.versions: VersionWriter | None = None
        self.pending_order: int | None = None
        """The order that waits for the result of the write."""

    def serve(self) -> None:
        """Lead or follow until the run ends. Raises LostPeers when the ranks have changed."""
        if self.world.first:
            self.lead()
        else:
            self.follow()

    def lead(self) -> None:
        """Take work for all ranks until the run ends."""
        assert self.client is not None
        settings, client, wait_s = self.context.settings, self.client, self.context.settings.wait_s
        # Heartbeats while this worker computes.
        WORK.on_advance = lambda: client.renew(settings.lease_s / 3)
        with self.writing, self.exports:
            while True:
                request = TakeWork(self.context.group.consumers, self.most, self.world.size)
                if self.trainer is not None:
                    request.role, request.ready = self.role, self.trainer.ready()
                work = client.take(request, wait_s)
                if isinstance(work.answer, Stop):
                    if self.world.elastic is not None and self.world.elastic.is_outdated:
                        raise LostPeers("the ranks have changed")
                    break
                # Broadcast even without work: it is the leader's heartbeat.
                self._together(work)
                if self.pending_order is not None and not self.writing.is_running:
                    self._together(WorkItem(self.context.data, Written(), Rows({})))
                is_heard_soon = self.pending_order is not None or self.exports.is_running
                wait_s = min(SOON_S, settings.wait_s) if is_heard_soon else settings.wait_s
        self._broadcast(pack_message((Stop(), [])))

    def _together(self, work: WorkItem) -> None:
        """Do a piece of work on all ranks; each gets the queue's answer, and the index columns of its rows."""
        if self.world.size > 1:
            frames = [bytes(frame) for frame in encode(work.inline)] if len(work.inline) else []
            self._broadcast(pack_message((work.answer, frames)))
        self._do(work)

    def follow(self) -> None:
        """Execute the leader's work until the run ends."""
        with self.writing, self.exports:
            while True:
                answer, frames = unpack_message(self._broadcast(), tuple[Broadcast, list[bytes]])
                if isinstance(answer, Stop):
                    return
                self._do(WorkItem(self.context.data, answer, decode(frames) if frames else Rows({})))

    def _broadcast(self, message: bytes = b"") -> bytes:
        """Broadcast the leader's message, once all ranks are here: the leader notices a lost one."""
        return bytes(self.world.reduce("the leader's work", message, lambda leader, _: leader, bytes))

    def _do(self, work: WorkItem) -> None:
        """Do this rank's part of the queue's answer."""
        answer = work.answer
        kind = type(answer).__name__
        stage = getattr(answer, "consumer", None) or getattr(answer, "stage", None) or kind
        self.world.at(stage)
        with WORK.on(f"{stage} ({kind})"), self.world.supervised(f"{stage} ({kind})"):
            self.exports.check()
            match answer:
                case LeasedRows():
                    consumer = self.context.consumers[answer.consumer]
                    if self.trainer is not None and consumer.updates:
                        self.trainer.take_in(work)
                        self._report_batch(self.trainer)
                    else:
                        self._forward(consumer, work, answer.iteration)
                case Step():
                    self._optim_step(answer)
                case Give():
                    self._give_weights(answer.stage)
                case Order():
                    self._obey(answer)
                case Written():
                    self._report_write()

    def _give_weights(self, stage: str) -> None:
        """Write the role's weights for the update of another role."""
        location = self._versions().begin()()
        self.world.meet("weights are there")
        if self.client is not None:
            self.client.ask(WeightsGiven(stage, location))

    def _report_write(self) -> None:
        """Report the first error of the ranks' writes, or that there was none."""
        trouble = self.world.reduce("what is written", self.writing.trouble(), lambda low, high: low or high)
        if self.client is not None:
            assert self.pending_order is not None
            self.client.ask(OrderDone(self.pending_order, trouble=trouble))
        self.pending_order = None

    def _forward(self, consumer: Consumer, work: WorkItem, iteration: int) -> None:
        """Run the stages of a consumer on the rows of a lease, and write their columns."""
        is_whole = True
        try:
            if self.world.size == 1:
                work.read()
            else:
                role, config, size = consumer.stages[0].role, self.context.executor.config, self.world.size
                costs, groups = balance_of(work.index, role, config, False, size)
                part_of = part_numbers(costs.numpy(), size, None if groups is None else groups.numpy())
                work.read(np.flatnonzero(part_of == self.world.rank).tolist())
        except Evicted:
            is_whole = False
        if not self.world.reduce("the ranks that have their rows", is_whole, lambda low, high: low and high):
            # Selection has dropped some of the rows in the meantime: the rest is leased again.
            if self.client is not None:
                self.client.ask(GiveBack([work.lease]))
                self.client.held.discard(work.lease)
            return
        rows, columns, reports = work.rows, dict[str, Any](), list[dict[str, Any]]()
        version, uids = iteration - 1 if self.context.group.trained else None, rows.uids() if work.positions else ()
        for stage in consumer.due(iteration):
            with self.context.trace.busy(stage.name, iteration, uids, version) as span:
                written = self.context.executor.run(stage, rows, span.sums)
                span.tokens = tokens_of(rows)
            rows, columns = rows.with_columns(written) if work.positions else rows, {**columns, **written}
            reports.append(span.report())
        part = write_columns(self.context.data, columns) if columns else None
        self._report(consumer, part, [(work.lease, work.positions)], [(work.lease, None)], reports)

    def _report_batch(self, trainer: Trainer) -> None:
        """Report the batch's rows as done if its last stage has run."""
        if not trainer.is_finished:
            return
        part, positions, fields = trainer.finish()
        self._report(trainer.consumer, part, positions, **fields)

    def _report(
        self,
        consumer: Consumer,
        part: StoredRows | None,
        rows: Positions,
        done: Positions,
        reports: Sequence[dict[str, Any]],
        totals: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Report rows as done, with the columns that all ranks have written; `rows` are those of this rank's part."""
        written = WrittenColumns({}, [])
        if part is not None:
            index = {name: part.index[name] for name in part.index}
            written = WrittenColumns(index, [(part.payload, len(part), rows)])
        written = self.world.reduce_to_first("columns", written, WrittenColumns.of_both, WrittenColumns)
        if self.client is not None:
            parts, frames = written.in_message()
            self.client.report(Done(consumer.name, done, parts, reports, totals), frames)

    def _optim_step(self, work: Step) -> None:
        """Make an optimizer step, or copy another role's published weights."""
        assert self.trainer is not None
        self.exports.wait()
        stage = next(stage for stage in self.trainer.consumer.updates if stage.name == work.stage)
        is_step = is_optimized(stage)
        report = self.trainer.step(stage, work.iteration) if is_step else self._copy_weights(stage, work)
        # A version that is made and not published is kept along with the previous one.
        if work.is_last and self.state.is_copied and self.state.copies_early:
            self.state.replica.keep(work.iteration, self.state.executor, retains=True)
        if self.client is not None:
            self.client.ask(Stepped(stage.name, report))
        if self.versions is not None:
            self.versions.forget(work.outdated)
        if work.export is not None:
            self._begin_export(work.export)
        if self.trainer.consumer.takes_rows:
            self.trainer.continue_after(stage)
            self._report_batch(self.trainer)

    def _copy_weights(self, stage: Stage, work: Step) -> dict[str, Any]:
        """Move the role's weights towards another role's published weights, as its EMA or a copy; return the report."""
        self.state.keep(work.iteration - 1)
        worker, source = torch_worker(self.context.executor.workers[self.role]), str(stage.params["source"])
        with self.context.trace.busy(stage.name, work.iteration, (), work.iteration - 1) as span:
            parts = copied_parts(worker, source, stage.params.get("decay", 0.0))
            assert work.weights is not None, "an update without a loss takes another role's weights"
            span.sums.add(f"weights/{self.role}/copied", sum(part.local.nbytes for part in parts.values()))
            try:
                source_of(work.weights).put_into(parts, Ranks(supervisor=self.world))
            except ValueError as error:
                raise UserError(f"{self.role} cannot take weights from {source}: {error}") from error
            # They are freed after the leader reports the step, when every rank has them.
            self.world.meet("weights of another role")
        return span.report()

    def _obey(self, order: Order) -> None:
        """Execute an order to save or load a checkpoint with all ranks; the leader reports the result."""
        executor, writes, trouble = self.context.executor, self.world.first, ""
        match order.task:
            case LoadCheckpoint(folder, version):
                self.exports.wait()
                self.state.load(folder)
                if version is not None:
                    # Engines may be ordered to load it immediately.
                    self._begin_export(version)
                    self.exports.wait()
                    self.world.meet("weights are there")
            case GoBack(version, export):
                trouble = self._go_back(version, export)
            case Save(folder, copy=True):
                self.writing.begin(executor.save(folder, writes, copy=True))
            case Save(folder):
                executor.save(folder, writes)
            case ReportWrite():
                # Report it only after it is written.
                self.pending_order = order.number
                return
            case MakeRows() | WriteRows():
                raise ValueError("rows are made and written by the rows process")
        if self.client is not None:
            self.client.ask(OrderDone(order.number, trouble=trouble))

    def _go_back(self, version: int, export: bool) -> str:
        """Undo the training after a version, with `export` publish it again, and trace the change of ranks; return an
        error or an empty string.
        """
        has_state = self.state.go_back(version)
        if has_state and export:
            self._begin_export(version)
        if (start := self.state.changed_at) is not None:
            trace, ranks = self.context.trace, f"{self.world.size} ranks"
            trace.record(Span(trace.worker, "ranks", ranks, version + 1, start, time.time()))
        return "" if has_state else f"a part of {self.role}'s state was on the lost ranks alone"

    def _begin_export(self, version: int) -> None:
        """Start to publish this version with the other ranks while the next rows are trained."""
        start = time.monotonic()
        publish = self._versions().begin()

        def publish_and_report() -> None:
            location = publish()
            if not self.world.first:
                return
            # From a thread of the first rank, in the leader's name.
            notice = NewWeights(self.role, version, location, time.monotonic() - start, holder=self.context.leader)
            self.context.data.connections.ask(self.context.queue, notice)

        self.exports.begin([publish_and_report])

    def _versions(self) -> VersionWriter:
        """Return the writer of the role's versions, created at the first publication."""
        if self.versions is None:
            worker, context = self.context.executor.workers[self.role], self.context
            assert isinstance(worker, ShardedBackend), f"check_backends lets {self.role} have no other here"
            deployment = context.executor.deployment
            # Engines on a shared base already have the weights below the adapters.
            parts = partial(torch_worker(worker).weights, self.role in deployment.shared_base)
            self.versions = VersionWriter(self.role, parts, self.world, deployment, context.run, context.ip)
        return self.versions


def serve_rows(client: Client, config: Config, kept: Mapping[str, Any], wait_s: float) -> None:
    """Make and write rows until the run ends; `kept` are the examples within the main process's length limit."""
    store = RowStore(with_data(without_data(config), kept))
    while not isinstance((work := client.take(TakeWork([], 0), wait_s)).answer, Stop):
        if not isinstance(work.answer, Order):
            continue
        match work.answer.task:
            case MakeRows(origin):
                columns = write_columns(client.data, dict(store.make(origin).items()))
                client.ask(OrderDone(work.answer.number, columns.payload), encode(columns.index))
            case WriteRows(path, payload, recorded):
                trouble, write = "", store.record if recorded else store.save
                try:
                    write(path, assembled(client.data, work.inline, payload, len(work.inline)))
                except OSError as error:
                    trouble = first_line(error)
                client.ask(OrderDone(work.answer.number, trouble=trouble))
            case task:
                raise ValueError(f"the rows process cannot {type(task).__name__}")

"""A trainer: one rank's share of a trained role's work on a batch. It receives each row once and keeps it until the
batch is trained.

take_in: a piece of rows ──infer, compute──▶ columns ──▶ updates in progress ──forward_backward, as rows arrive──▶ ready
step ──optim_step──▶ the next update ... the last one ──▶ later stages ──▶ finish: written columns, reports

Stages run through the executor, as in every runtime. All ranks of the role call the same methods in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.packing import part_numbers
from braidrl.data.rows import IDENTITY, Rows, tokens_of
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.batches import UpdatesInProgress, trained_on
from braidrl.flow.compute import State, added, of_namespace, summed
from braidrl.flow.flow import is_optimized
from braidrl.observe.metrics import Sums, merged
from braidrl.observe.trace import BusySpan, WorkerTrace
from braidrl.queue.client import DataPlane, WorkItem, write_columns
from braidrl.queue.table import StoredRows
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.streaming.consumers import Consumer
from braidrl.runtimes.streaming.work import LeasedRows
from braidrl.training.objective import COUNTED, Accumulated, UpdateCounts
from braidrl.training.row_costs import balance_of

LossSums = tuple[dict[str, float], dict[str, tuple[float, float]]]
"""Loss sums by name, and metric sums in the form of `Sums.pairs`."""


class Trainer:
    """A trained role on one rank."""

    def __init__(
        self,
        consumer: Consumer,
        executor: StageExecutor,
        trace: WorkerTrace,
        data: DataPlane,
        world: World,
        most: int,
        keep: Callable[[int], object],
    ) -> None:
        """Start without a batch.

        At most `most` rows pass through the model at a time, over all ranks. `keep` is called with the version of the
        weights before a batch changes them.
        """
        self.consumer, self.executor, self.trace, self.data = consumer, executor, trace, data
        self.world, self.most, self.keep = world, most, keep
        self._forget()

    def _forget(self) -> None:
        self.iteration = 0
        self.stages: list[Stage] = []
        self.at = 0
        """Position of the train stage that is next among the stages."""
        self.pieces: list[WorkItem] = []
        self.work_of_ranks = np.zeros(self.world.size)
        """The work on the rows of the batch that each rank has, as `balance_of` counts it."""
        self.rows_left = 0
        """Rows of the batch that have not arrived."""
        self.states: Mapping[str, State] = {}
        self.totals: dict[str, dict[str, float]] = {}
        self.reports: dict[str, tuple[float, Sums]] = {}
        """Seconds and sums of each stage."""
        self.updates: UpdatesInProgress | None = None
        self.counted: list[Rows] = []
        """Index columns of the rows that the current update has."""
        self.losses: dict[str, float] = {}
        """Loss sums of the current update, of all ranks."""

    def take_in(self, work: WorkItem) -> None:
        """Run the stages before the first update on new rows, and accumulate those of the current update."""
        leased: LeasedRows = work.answer
        batch = leased.batch
        assert batch is not None, "rows of a trainer belong to a batch"
        if not self.iteration:
            self.keep(leased.iteration - 1)
            self.iteration, self.states = leased.iteration, leased.states
            self.stages, self.rows_left = self.consumer.due(leased.iteration), batch.batch_rows
            self.at, self.steps = self._next_update(0), (batch.steps, batch.update_rows)
            self.updates = UpdatesInProgress(*self.steps)
        assert self.updates is not None
        if self.world.size == 1:
            work.index = work.read().index
        else:
            starts = range(0, work.size, self.most)
            dispatches = [range(start, min(start + self.most, work.size)) for start in starts]
            work.read([position for rows in dispatches for position in self._own_share(work.index, rows)])
        self.rows_left -= work.size
        self.pieces.append(work)
        for stage in self.stages[: self.at]:
            self._run(stage, work)
        self.updates.add(work, batch.updates)
        self._accumulate()

    def _own_share(self, index: Rows, dispatch: range) -> list[int]:
        """Return the positions of this rank's rows in a dispatch: the fullest part goes to the rank with the least work
        so far.
        """
        ranks, role = self.world.size, self.consumer.updates[0].role
        costs, groups = balance_of(index.take(dispatch), role, self.executor.config, True, ranks)
        part_of = part_numbers(costs.numpy(), ranks, None if groups is None else groups.numpy())
        next_ranks = np.argsort(self.work_of_ranks, kind="stable")
        self.work_of_ranks[next_ranks] += np.bincount(part_of, costs.numpy(), minlength=ranks)
        mine = (next_ranks == self.world.rank).argmax()
        positions: list[int] = (np.flatnonzero(part_of == mine) + dispatch.start).tolist()
        return positions

    def ready(self) -> list[str]:
        """Return the train stage whose next step can be made, as far as this worker knows."""
        if not self.iteration or self.at == len(self.stages):
            return []
        stage, before = self.stages[self.at], self.stages[: self.at]
        # Old log-probs are computed with the weights before the first step.
        waits = self.rows_left and any(earlier.kind is Kind.INFER for earlier in before)
        if not is_optimized(stage):
            return [] if self.rows_left else [stage.name]
        assert self.updates is not None
        return [stage.name] if self.updates.is_complete and not waits else []

    def step(self, stage: Stage, iteration: int) -> dict[str, Any]:
        """Make the optimizer step that is ready; return its report."""
        with self._busy(stage, ()) as span:
            # Every rank has the global sums: the first one reports them.
            losses, first = self.losses, self.world.first
            objective = self.executor.objective(stage)
            counts = UpdateCounts.of(of_namespace(Rows.cat(self.counted), objective.namespace))
            accumulated = Accumulated().add(objective, losses if first else {}, counts)
            self.executor.optim_step(objective.role, accumulated, iteration, span.sums, counted=first)
            self._added_up({}, span)
        self.losses, self.counted = {}, []
        report: dict[str, Any] = span.report()
        return report

    def continue_after(self, stage: Stage) -> None:
        """Continue after a step of a train stage: with its next update, or with the stages that follow."""
        assert self.updates is not None
        if is_optimized(stage):
            self.updates.steps_made += 1
            if self.updates.steps_made < self.updates.steps:
                self._accumulate()
                return
        before, self.at = self.at, self._next_update(self.at + 1)
        for later in self.stages[before + 1 : self.at]:
            for piece in self.pieces:
                self._run(later, piece)
        if self.at == len(self.stages):
            return
        self.updates = UpdatesInProgress(*self.steps)
        for piece in self.pieces:
            self.updates.add(piece, piece.answer.batch.updates)
        self._accumulate()

    @property
    def is_finished(self) -> bool:
        """Return True if the batch's last stage has run."""
        return bool(self.iteration) and self.at == len(self.stages) and not self.rows_left

    def finish(self) -> tuple[StoredRows | None, list[tuple[int, list[int]]], dict[str, Any]]:
        """End the batch.

        Returns the columns that this rank has written, if any, their rows, and further fields of `Client.done`.
        """
        names = list(dict.fromkeys(name for stage in self.stages for name in stage.writes))
        read = [piece for piece in self.pieces if piece.positions]
        part = None
        if names and read:
            rows = Rows.cat([piece.rows.only(names) for piece in read])
            part = write_columns(self.data, dict(rows.items()))
        reports = [
            {"stage": name, "seconds": seconds, "sums": sums.pairs()} for name, (seconds, sums) in self.reports.items()
        ]
        done, totals = [(piece.lease, None) for piece in self.pieces], self.totals
        self._forget()
        return (
            part,
            [(piece.lease, piece.positions) for piece in read],
            {"done": done, "reports": reports, "totals": totals},
        )

    def _next_update(self, start: int) -> int:
        """Return the position of the next train stage from a position on; the end if there is none."""
        trains = (position for position in range(start, len(self.stages)) if self.stages[position].kind is Kind.TRAIN)
        return next(trains, len(self.stages))

    def _dispatches(self, positions: Sequence[int]) -> Iterator[Sequence[int]]:
        return (positions[start : start + self.most] for start in range(0, len(positions), self.most))

    # Stages that write columns

    def _run(self, stage: Stage, piece: WorkItem) -> None:
        """Run an infer or compute stage on a piece."""
        stage = replace(stage, params={**stage.params, **self.states.get(stage.name, {})})
        rows, parts_written = piece.rows, list[Rows]()
        with self._busy(stage, rows.uids() if piece.positions else ()) as span:
            columns: dict[str, Any] = {}
            if stage.scope is Scope.GROUP and self.world.size > 1:
                # Groups span ranks: each rank computes the stage for all rows.
                columns = self._computed_everywhere(stage, piece, span.sums)
            elif stage.kind is Kind.INFER:
                for positions in self._dispatches(range(piece.size)):
                    part = piece.share(positions)
                    if written := self.executor.run(stage, part, span.sums):
                        parts_written.append(Rows(written))
                columns = dict(Rows.cat(parts_written).items())
            else:
                columns = dict(self.executor.run(stage, rows, span.sums, reduce=self._reduced).items())
            if stage.state:
                local_sums = summed(stage, rows) if piece.positions else {}
                self.totals[stage.name] = {name: float(total) for name, total in self._reduced(local_sums).items()}
            span.tokens = tokens_of(rows) if piece.positions else 0
        piece.rows = rows.with_columns(columns) if columns else rows
        if counted := [name for name in stage.writes if name.rsplit(".", 1)[-1] in COUNTED]:
            # The counts of an update are over the rows of all ranks.
            packed = pack_rows(piece.rows.only([*IDENTITY, *counted])) if piece.positions else None
            gathered = self.world.gather("counted columns", packed)
            everywhere = Rows.cat([unpack_rows(part) for part in gathered if part])
            everywhere = everywhere.take(everywhere.positions_of(piece.index))
            piece.index = piece.index.with_columns(dict(everywhere.items()))
        self._note(span)

    def _computed_everywhere(self, stage: Stage, piece: WorkItem, sums: Sums) -> dict[str, Any]:
        """Compute a group-scope stage for all rows of a piece; return the columns of this rank's rows."""
        rows, reads = piece.rows, (*stage.reads, *stage.optional)
        before = self.stages[: self.stages.index(stage)]
        written = {name for earlier in before for name in earlier.writes if name.rsplit(".", 1)[-1] not in COUNTED}
        stored = {name for location in piece.answer.payload for name in location.columns}
        if written.union(stored).isdisjoint(reads):
            index = piece.index
        else:
            # Each rank has the columns of its own rows.
            read = [*rows.index, *(name for name in reads if name in rows.payload)]
            parts = self.world.gather("columns of groups", pack_rows(rows.only(read)) if piece.positions else None)
            index = Rows.cat([unpack_rows(part) for part in parts if part])
        index = index.ordered()
        columns = Rows(self.executor.run(stage, index, sums))
        if not piece.positions:
            return {}
        return dict(columns.take(index.positions_of(rows)).items())

    def _reduced(self, totals: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the sums over all ranks."""
        if self.world.size == 1:
            return totals
        as_rows = {name: total.double()[None] for name, total in totals.items()}
        sums = self.world.reduce("sums", as_rows, added, dict[str, Tensor])
        return {name: total[0] for name, total in sums.items()}

    # Updates

    def _accumulate(self) -> None:
        """Pass the rows of the current update that have arrived through the model."""
        if self.at == len(self.stages) or not is_optimized(self.stages[self.at]):
            return
        stage, updates = self.stages[self.at], self.updates
        assert updates is not None
        objective = self.executor.objective(stage)
        by_group = "group_tokens" in objective.aggregation.reads
        pieces = updates.take(by_group)
        index = [piece.index.take(positions) for piece, positions in pieces]
        self.counted += index
        if by_group and pieces:
            shares = [rows for piece, positions in pieces if len(rows := piece.share(positions))]
            rows = Rows.cat(shares).ordered() if shares else Rows({})
            self._forward_backward(stage, self.executor.update(objective, Rows.cat(index), rows)[1])
            return
        for piece, positions in pieces:
            for some in self._dispatches(positions):
                self._forward_backward(stage, piece.share(some))

    def _forward_backward(self, stage: Stage, rows: Rows) -> None:
        losses: dict[str, float] = {}
        with self._busy(stage, rows.uids() if len(rows) else ()) as span:
            # Ranks that shard the model run collectives even if one has no row.
            if len(rows) or self.executor.workers[str(stage.role)].ranks.forward_is_collective:
                span.tokens = tokens_of(rows)
                with self.executor.progress.stage(stage.name) as bar:
                    losses = self.executor.forward_backward(self.executor.objective(stage), rows, span.sums, bar)
        for name, loss in self._added_up(losses, span).items():
            self.losses[name] = self.losses.get(name, 0.0) + loss
        self._note(span)

    def _added_up(self, losses: dict[str, float], span: BusySpan) -> dict[str, float]:
        """Return the loss sums of all ranks, and add all metric sums to the span."""
        if self.world.size == 1:
            return losses

        def together(low: LossSums, high: LossSums) -> LossSums:
            names = dict.fromkeys((*low[0], *high[0]))
            return {name: low[0].get(name, 0.0) + high[0].get(name, 0.0) for name in names}, merged(low[1], high[1])

        losses, pairs = self.world.reduce("loss sums", (losses, span.sums.pairs()), together, LossSums)
        span.sums = Sums(pairs)
        return losses

    def _busy(self, stage: Stage, uids: Sequence[Any]) -> Any:
        return self.trace.busy(stage.name, self.iteration, uids, trained_on(self.iteration))

    def _note(self, span: BusySpan) -> None:
        """Add a span to its stage's report."""
        seconds, sums = self.reports.get(span.stage, (0.0, Sums()))
        sums.merge(span.sums)
        self.reports[span.stage] = seconds + span.seconds, sums

"""One iteration of a flow, stage by stage in serial order; shared by eager, hybrid and distributed.

            ┌──────────── waves, until enough groups are kept ────────────┐
admit ─▶ generate ─▶ verify ─▶ select ──▶ the rest of the stages ──▶ updates ──▶ publish
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

import numpy as np

from braidrl.config import Config
from braidrl.data.rows import FinishReason, Rows
from braidrl.errors import BadUpdate
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import training_order, update_plan
from braidrl.flow.compute import State, dropped, next_state
from braidrl.flow.selecting import SURPLUS, UNFINISHED, GroupSelector, Verdict, verdicts_by_group
from braidrl.observe.metrics import Sums
from braidrl.observe.stalls import WORK
from braidrl.observe.trace import traced
from braidrl.runtimes.generating.partial import TO_THE_END
from braidrl.runtimes.generating.verification import segment_of
from braidrl.runtimes.interfaces import IterationResult, Position, Restart, SerialBackend, StartedBatch, TableT, needed
from braidrl.runtimes.row_store import Admission


class SerialController(Generic[TableT]):
    """Runs a flow's stages in order.

    It holds the state between iterations: selection, surplus rows and the stages' states.
    """

    def __init__(self, config: Config, flow: Flow, backend: SerialBackend[TableT]) -> None:
        assert backend.loader is not None, "an iteration begins with prompts"
        trainer, loader = config.trainer, backend.loader
        self.config, self.flow, self.backend, self.loader = config, flow, backend, loader
        self.sampling = GroupSelector(
            trainer.prompts_per_step, loader.epoch_size, trainer.surplus, trainer.max_staleness, trainer.over_sampling
        )
        self.surplus: list[TableT] = []
        self.unfinished: list[TableT] = []
        """Rows of groups with suspended responses."""
        self.states = {stage.name: dict(stage.state) for stage in flow.stages if stage.state}
        self.seconds: dict[str, float] = {}

    def iterate(
        self,
        iteration: int,
        version: int,
        recorded: TableT | None = None,
        train: bool = True,
        before_training: Callable[[], object] = lambda: None,
    ) -> IterationResult[TableT]:
        self.seconds, sums = {stage.name: 0.0 for stage in self.flow.stages}, Sums()
        if recorded is not None:
            index = self.backend.index(recorded)
            result = IterationResult(index, index, recorded, recorded, sums)
        else:
            result = self.sample(iteration, version, sums)
        table, states = self.ordered(result.table), dict(self.states)
        result.table = table
        try:
            for stage in self.flow.stages[self.flow.recorded_stages :]:
                training = stage.kind is Kind.TRAIN
                if not stage.when.includes(iteration) or (training and not train):
                    continue
                if training:
                    before_training()
                with self.timed(stage):
                    if training:
                        self.backend.train(stage, table, self.updates(table, iteration), iteration, sums)
                    else:
                        table, states[stage.name] = self.run_with_state(stage, table, iteration, sums)
            if train:
                self.backend.publish(version + 1)
                self.states = {name: states[name] for name in self.states}
        except BadUpdate as error:
            # The batch as recorded, and with all columns so far.
            error.batch = (result.table, table)
            raise
        result.batch, result.seconds, result.final = self.backend.index(table), self.seconds, table
        if not self.flow.sampling_segment:
            # Without selection all generated rows are in the batch, with the scores added later.
            result.generated = result.batch
        for name, value in self.loader.measure(iteration, result.generated).items() if recorded is None else ():
            sums.add(name, value)
        return result

    def position(self) -> Position:
        kept = [*self.surplus, *self.unfinished]
        return Position(self.loader.state(), self.sampling.state(), kept, dict(self.states))

    def started_ahead(self) -> list[StartedBatch]:
        """Return no batches: each one starts after the previous one has ended."""
        return []

    def is_awaited(self) -> bool:
        return self.backend.is_awaited()

    def begin_again(self, version: int) -> Restart:
        """Let the backend replace lost processes.

        All rows are forgotten, including the surplus.
        """
        if not self.backend.begin_again():
            return Restart.OF_ALL
        self.surplus, self.unfinished = [], []
        return Restart.FROM_CHECKPOINT

    def run_with_state(self, stage: Stage, table: TableT, iteration: int, sums: Sums) -> tuple[TableT, State]:
        """Return the table with the stage's columns, and its state for the next iteration; empty for most stages."""
        if not stage.state:
            return self.backend.run(stage, table, iteration, sums), {}
        state = self.states[stage.name]
        stage = replace(stage, params={**stage.params, **state})
        for name, value in state.items():
            sums.add(f"{stage.name}/{name}", value)
        done = self.backend.run(stage, table, iteration, sums)
        return done, next_state(stage, state, self.backend.totals(stage, table))

    def restore(self, position: Position) -> None:
        self.surplus, self.unfinished = [], []
        self.loader.restore(position.loader)
        self.sampling = GroupSelector.restored(position.sampling)
        awaited = set(self.sampling.pending)
        for table in position.surplus:
            unfinished = set(self.backend.index(table)["group"].tolist()) <= awaited
            (self.unfinished if unfinished else self.surplus).append(table)
        self.states |= {name: dict(state) for name, state in position.stages.items() if name in self.states}

    def sample(self, iteration: int, version: int, sums: Sums) -> IterationResult[TableT]:
        """Return a batch of selected groups, generated in waves; the surplus is dropped or kept for the next batch."""
        self.sampling.begin(version)
        self.loader.begin(iteration)
        tables, generated = list(self.surplus), []
        while True:
            count = self.sampling.next_wave()
            # After the last wave, suspended responses of groups that are still needed must finish.
            ends = not count and not self.sampling.pending
            if ends and not self.sampling.finish_now():
                break
            # The rows of pending groups whose responses resume, and of the next `count` groups.
            awaited, started, left = set(self.sampling.pending), list[TableT](), list[TableT]()
            for rows in self.unfinished:
                groups = set(self.backend.index(rows)["group"].tolist())
                started += [self.of_groups(rows, groups & awaited)] if groups & awaited else []
                left += [self.of_groups(rows, groups - awaited)] if groups - awaited else []
            self.unfinished = left
            if count:
                numbers = self.loader.advance(count)
                started.append(self.backend.read(Admission(numbers, self.loader.examples(numbers))))
                self.sampling.admit(self.backend.index(started[-1])["group"].unique().tolist())
            table = started[0].cat(started) if len(started) > 1 else started[0]
            table, verdicts = self.wave(table, ends, iteration, version, sums)
            if table is not None:
                tables.append(table)
                generated.append(self.backend.index(table))
            self.sampling.decide(verdicts)
        outcome = self.sampling.finish()
        everything: TableT = tables[0].cat(tables)
        batch = self.of_groups(everything, outcome.groups)
        self.surplus = [self.of_groups(everything, outcome.surplus)] if outcome.surplus else []
        index = self.backend.index(batch)
        counted = needed(Rows.cat(generated), outcome, self.config.trainer.surplus) if generated else index
        return IterationResult(counted, index, batch, batch, sums, dropped=outcome.dropped)

    def wave(
        self, started: TableT, ends: bool, iteration: int, version: int, sums: Sums
    ) -> tuple[TableT | None, dict[int, Verdict]]:
        """Run the sampling segment on rows, and return which groups are kept.

        Groups with a suspended response are kept for later, outside the table; the table is None without other groups.
        """
        table: TableT | None = started
        # If surplus is kept, every group is used.
        early = self.config.trainer.surplus == "drop"
        segment = segment_of(self.flow, iteration, self.sampling.target, self.sampling.kept()) if early else None
        partial = self.config.rollout.tokens_per_iteration is not None
        gone: set[int] = set()
        reasons: dict[int, str | None] = {}
        for stage in self.flow.stages[: self.flow.recorded_stages]:
            if table is None or not stage.when.includes(iteration):
                continue
            with self.timed(stage):
                if stage.kind is Kind.SELECT:
                    index = self.backend.index(table)
                    with traced(self.backend.trace, "compute", stage.name, iteration, rows=len(index)):
                        reasons |= dropped(stage, index)
                    continue
                stops = segment is not None and stage is segment.generate
                pauses = partial and stage.kind is Kind.GENERATE
                if pauses and ends:
                    stage = replace(stage, params={**stage.params, TO_THE_END: True})
                done = table = self.backend.run(stage, table, iteration, sums, segment if stops else None)
                if stops or pauses:
                    index = self.backend.index(done)
                    aborted = set(index["group"][index["finish_reason"] == FinishReason.ABORT].tolist())
                    if aborted:
                        others = set(index["group"].tolist()) - aborted
                        table = self.of_groups(done, others) if others else None
                    if aborted and pauses:
                        self.unfinished.append(self.of_groups(done, aborted))
                        self.sampling.decide({group: Verdict(UNFINISHED) for group in aborted})
                    elif stops:
                        gone = aborted
        verdicts = dict[int, Verdict]()
        if table is not None:
            verdicts = verdicts_by_group(self.backend.index(table), reasons, version, partial)
        return table, verdicts | {group: Verdict(SURPLUS, version) for group in gone}

    def of_groups(self, table: TableT, groups: Collection[int]) -> TableT:
        chosen = np.isin(self.backend.index(table)["group"].numpy(), list(groups))
        return table if chosen.all() else table.take(chosen.nonzero()[0].tolist())

    def ordered(self, table: TableT) -> TableT:
        """Return the rows sorted by (group, sample), the training order of every runtime."""
        index = self.backend.index(table)
        order = training_order(index["group"].numpy(), index["sample"].numpy())
        return table if (np.diff(order) == 1).all() else table.take(order.tolist())

    def updates(self, table: TableT, iteration: int) -> list[list[int]]:
        """Return the row positions of each optimizer step of this iteration."""
        index = self.backend.index(table)
        return update_plan(
            index["group"].numpy(),
            index["sample"].numpy(),
            rows_per_update=self.config.trainer.rows_per_update or len(index),
            epochs=self.config.trainer.epochs,
            seed=self.config.seed,
            iteration=iteration,
        )

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        start = time.perf_counter()
        with WORK.on(stage.name):
            yield
        self.seconds[stage.name] += time.perf_counter() - start

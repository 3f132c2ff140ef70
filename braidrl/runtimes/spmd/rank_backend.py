"""The backend of processes that hold every role: distributed ranks run the same chain of stages, and eager is a world
of one rank.

rank 0  its prompts ─generate─▶ its rows ──verify──▶ its rows ╮            ╭─▶ its rows ──forward_backward──╮
rank 1  its prompts ─generate─▶ its rows ──verify──▶ its rows ┼▶ balanced? ┼─▶ its rows ──forward_backward──┼▶ sum, step
                                    │                    │    ╰all-to-all──╯
                                    ╰── index columns ───┴──▶ gathered on every rank: selection, updates and partitions
                                                              follow from them, the same everywhere

Every rank knows the index columns of all rows; a row's payload is on one rank.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from braidrl.cluster.child import at_end
from braidrl.cluster.row_deaths import RowDeaths
from braidrl.cluster.world import World
from braidrl.data.packing import in_turn
from braidrl.data.rows import Column, Rows, tokens_of
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.batches import update_plan
from braidrl.flow.compute import of_namespace, summed
from braidrl.observe.metrics import Sums
from braidrl.observe.rollouts import merge_parts, part_path, publish, unpublished
from braidrl.observe.trace import TraceWriter, traced
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.verification import EarlyStop, Segment
from braidrl.runtimes.interfaces import Interrupts
from braidrl.runtimes.isolation import can_isolate, run_isolated
from braidrl.runtimes.row_store import Admission, Origin, RowStore, RowText
from braidrl.runtimes.spmd.shard import Shard, ShardExchange, balanced_owners
from braidrl.training.objective import Accumulated, UpdateCounts
from braidrl.training.optimizer import CONFIGURED, StepOverrides
from braidrl.training.roles.checkpoint import Write
from braidrl.training.row_costs import balance_of


class RankBackend:
    """The backend of a process that holds every role.

    All ranks receive the same calls in the same order; eager has one rank.
    """

    def __init__(
        self,
        executor: StageExecutor,
        store: RowStore,
        world: World,
        interrupts: Interrupts,
        trace: TraceWriter | None,
        any_stage: bool = False,
    ) -> None:
        """Store the parts.

        With `any_stage` stages need not be in the flow, and columns that no later stage of the flow reads are kept.
        """
        self.config, self.flow, self.executor, self.store = executor.config, executor.flow, executor, store
        self.loader = store.loader
        self.world, self.interrupts, self.trace = world, interrupts, trace
        self.any_stage = any_stage
        self.exchange, self.waves = ShardExchange(world, interrupts, trace), 0
        self.accumulated: dict[str, Accumulated] = {}
        """The objectives of each role's next optimizer step, of a session."""
        self.deaths = RowDeaths()
        """The rows that have ended ranks of the run."""

    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.exchange.version = version

    def is_awaited(self) -> bool:
        """Return False: ranks admit processes without the controller."""
        return False

    def begin_again(self) -> bool:
        """Return False: there is one process, or all ranks work together."""
        return False

    def index(self, table: Shard) -> Rows:
        return table.index

    def save(self, folder: Path, copy: bool = False) -> list[Write]:
        if copy:
            self.world.at(f"copying for {folder.name}")
        # The first rank writes the replicated parts.
        return self.executor.save(folder, self.world.first, copy)

    def load(self, folder: Path, version: int) -> None:
        self.executor.load(folder)
        self.publish(version)

    def regroup(self) -> None:
        """Work with the world's current ranks from now on; all of them call this together."""
        self.exchange, self.waves = ShardExchange(self.world, self.interrupts, self.trace), 0
        self.accumulated.clear()
        self.executor.regroup()

    def close(self) -> None:
        if self.executor.close in at_end:
            at_end.remove(self.executor.close)
        self.executor.close()
        if self.trace is not None:
            self.trace.close()

    def read(self, origin: Origin) -> Shard:
        """Make this rank's share of the rows; each rank tokenizes only its admitted prompts."""
        rank, size, rows = self.world.rank, self.world.size, Rows({})
        self.world.at("admission" if isinstance(origin, Admission) else f"reading {type(origin).__name__}")
        if isinstance(origin, Admission):
            samples = self.config.rollout.samples_per_prompt
            group_of = torch.tensor(origin.numbers, dtype=torch.int64).repeat_interleave(samples)
            # If selection may not need the last groups, every rank starts with some of the first groups; otherwise
            # ranks get neighbouring rows.
            if self.flow.sampling_segment:
                owner = torch.from_numpy(in_turn(group_of.numpy(), size))
            else:
                owner = torch.arange(len(group_of)) * size // max(len(group_of), 1)
            mine = (owner == rank).nonzero().flatten().tolist()
            position = {group: number for number, group in enumerate(sorted(set(group_of[mine].tolist())))}
            if mine:
                numbers = [position[int(group_of[row])] * samples + row % samples for row in mine]
                drawn = dict(zip(origin.numbers, origin.examples, strict=False))
                examples = [drawn[number] for number in position] if drawn else ()
                rows = self.store.make(Admission(tuple(position), examples)).take(numbers)
        else:
            rows = self.store.make(origin, rank, size)
            local_count = {"rows": torch.tensor([len(rows)])}
            sizes = self.world.gather_columns("numbers of rows", local_count, torch.ones(size, dtype=torch.int64))[
                "rows"
            ]
            owner = torch.arange(size).repeat_interleave(sizes)
        return self.exchange.gather(Shard(Rows({}), owner, Rows({}), rank), dict(rows.items()), Sums(), Sums())

    def run(self, stage: Stage, table: Shard, iteration: int, sums: Sums, segment: Segment | None = None) -> Shard:
        """Run a stage on the ranks that hold its rows; inference is balanced first.

        In a `segment` ranks exchange results, and end rows early, unless rows are isolated.
        """

        def run(stage: Stage, rows: Shard) -> Shard:
            return self._run(stage, rows, iteration, sums)

        if self.deaths.isolates and can_isolate(stage) and self.deaths.concern(uids := table.index.uids()):
            return run_isolated(run, stage, table, uids, self.deaths)
        return self._run(stage, table, iteration, sums, segment)

    def _run(self, stage: Stage, table: Shard, iteration: int, sums: Sums, segment: Segment | None = None) -> Shard:
        """Run a stage on all rows of a table together."""
        self.exchange.iteration = iteration
        self.world.at(f"step {iteration}, {stage.name}")
        stop = None
        if segment is not None or (stage.kind is Kind.GENERATE and self.world.size > 1):
            self.waves += 1
            samples = self.config.rollout.samples_per_prompt
            stop = EarlyStop(segment, self.flow, table.rows.uids(), samples, self.world, self.waves)
        if self._known_everywhere(stage, table):
            return self._computed_everywhere(stage, table)
        if stage.kind is Kind.INFER:
            table = self._balanced_for_inference(stage, table)
        elif stage.scope is Scope.GROUP:
            groups, equal_costs = table.index["group"], torch.ones_like(table.owner)
            table = self.exchange.move(
                stage.name, table, balanced_owners(equal_costs, table.owner, self.world.size, groups)
            )
        local_sums, columns = Sums(), dict[str, Column]()
        # If ranks compute together, none may leave in the middle.
        collective = self.executor.is_collective(stage)
        try:
            with (
                nullcontext() if collective else self.interrupts.local(),
                self.exchange.working(stage, table.rows) as done,
            ):
                columns = dict(self.executor.run(stage, table.rows, local_sums, stop, self.exchange.add_up))
                done.tokens = tokens_of(Rows(columns)) or done.tokens
        except KeyboardInterrupt:
            if self.interrupts.alone:
                raise
            columns = {}  # all ranks end together, in the gather
            if stop is not None:
                stop.close(complete=False)
        if stop is not None:
            stop.close()
        return self.exchange.gather(table, columns, local_sums, sums)

    def _computed_everywhere(self, stage: Stage, table: Shard) -> Shard:
        """Compute a stage for all rows on this rank, from their index columns; the first rank traces it."""
        trace, version = self.trace if self.world.first else None, self.exchange.version
        with traced(trace, "compute", stage.name, self.exchange.iteration, rows=len(table), version=version):
            everywhere = Rows(self.executor.run(stage, table.index, Sums()))
        payload = everywhere.payload.take(table.local_positions) if len(table.local_positions) else Rows({})
        return table.with_columns(everywhere.index, payload)

    def _balanced_for_inference(self, stage: Stage, table: Shard) -> Shard:
        """Balance the rows over the ranks within each later update, so that they need not move again."""
        needed = self._reads(stage)
        if needed is not None:
            # Columns that no later stage reads are not moved.
            later = self.flow.stages[self.flow.stages.index(stage) :]
            needed = [column.name for s in later for column in self.flow.inputs[s.name]]
        index, owner = table.index, table.owner.clone()
        costs, groups = balance_of(index, stage.role, self.config, False, self.world.size)
        rows = self.config.trainer.rows_per_update or len(index)
        if rows == len(index) or len(index) % rows:
            owner = balanced_owners(costs, owner, self.world.size, groups)
        else:
            updates = update_plan(
                index["group"].numpy(),
                index["sample"].numpy(),
                epochs=1,
                seed=self.config.seed,
                rows_per_update=rows,
                iteration=self.exchange.iteration,
            )
            for update in map(torch.as_tensor, updates):
                whole = None if groups is None else groups[update]
                owner[update] = balanced_owners(costs[update], owner[update], self.world.size, whole)
        return self.exchange.move(stage.name, table, owner, needed)

    def totals(self, stage: Stage, table: Shard) -> dict[str, float]:
        everywhere = self._known_everywhere(stage, table)
        rows = table.index if everywhere else table.rows
        local_totals = summed(stage, rows) if len(rows) else {}
        return {
            name: float(total)
            for name, total in (local_totals if everywhere else self.exchange.add_up(local_totals)).items()
        }

    def train(self, stage: Stage, table: Shard, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Distribute each update's rows by length; every rank then makes the same optimizer step."""
        self.exchange.iteration = iteration
        self.world.at(f"step {iteration}, {stage.name}")
        local_sums = Sums()
        parts = (self._update(stage, table.take(update), number) for number, update in enumerate(updates, 1))
        total = sum(map(len, updates)) if self.world.size == 1 else None
        self.executor.train(stage, parts, iteration, local_sums, total, self.world.first)
        self.exchange.gather(replace(table, index=Rows({})), {}, local_sums, sums)

    def forward_backward(self, stage: Stage, table: Shard, iteration: int, sums: Sums) -> None:
        self.exchange.iteration = iteration
        local_sums, objective = Sums(), self.executor.objective(stage)
        accumulated = self.accumulated.setdefault(objective.role, Accumulated())
        with (
            self._update(stage, table, len(accumulated.objectives) + 1) as (counts, rows),
            self.executor.progress.stage(stage.name, len(rows)) as bar,
        ):
            losses = self.executor.forward_backward(accumulated.own_sums(objective), rows, local_sums, bar)
        accumulated.add(objective, losses, counts)
        self.exchange.gather(replace(table, index=Rows({})), {}, local_sums, sums)

    def optim_step(self, role: str, iteration: int, sums: Sums, overrides: StepOverrides = CONFIGURED) -> None:
        local_sums, accumulated = Sums(), self.accumulated.pop(role)
        self.world.at(f"step {iteration}, optimizer step of {role}")
        self.executor.optim_step(role, accumulated, iteration, local_sums, self.world.first, overrides)
        self.exchange.add_sums("metrics of an optimizer step", local_sums, sums)

    @contextmanager
    def _update(self, stage: Stage, part: Shard, number: int) -> Iterator[tuple[UpdateCounts, Rows]]:
        """Return one update on its training ranks: the counts of all rows, and the local rows."""
        self.world.at(f"step {self.exchange.iteration}, {stage.name}, update {number}")
        objective = self.executor.objective(stage)
        index, size = of_namespace(part.index, objective.namespace), self.world.size
        costs, groups = balance_of(index, stage.role, self.config, True, size, objective.whole_groups)
        owner = balanced_owners(costs, part.owner, size, groups)
        part = self.exchange.move(stage.name, part, owner, self._reads(stage))
        with self.exchange.working(stage, part.rows):
            yield self.executor.update(objective, part.index, part.rows)

    def texts(self, table: Shard) -> list[RowText]:
        return self.store.row_texts(table.rows)

    def record(self, path: Path, table: Shard, final: Shard) -> None:
        """Write this rank's rows to a file; a rank per machine merges its files; no rank holds all rows."""
        self.world.at(f"writing {path.name}")
        rank, part = self.world.rank, part_path(path, self.world.rank)
        for left in [part, *path.parent.glob(part_path(path, 0).name[:-1] + "*")] if self.world.first else [part]:
            # Files of ranks that were lost while they recorded.
            left.unlink(missing_ok=True)
        if self.world.first:
            shutil.rmtree(unpublished(path), ignore_errors=True)
        # A rank without rows knows no payload columns, so the others send their names.
        names = (sorted(table.payload), sorted(final.payload))
        before, after = self.world.reduce("names of columns", names, united, Names)
        added = set(after) - set(before)
        later = replace(final, payload=final.payload.only(sorted(added & set(final.payload))))
        if added:
            later = self.exchange.move(path.name, later, table.owner)
        if len(rows := table.rows):
            self.store.record(part, rows, replace(later, owner=table.owner).rows)
        filled = set(table.owner.tolist())
        machines = [ranks for machine in self.world.machines if (ranks := [r for r in machine if r in filled])]
        self.world.meet("written rows")
        columns = list[str]()
        for number, ranks in enumerate(machines):
            if ranks[0] == rank:
                columns = merge_parts(path, number, [part_path(path, r) for r in ranks])
        self.world.reduce("columns of the recording", columns, same_columns, list[str])
        if self.world.first and machines:
            publish(path)

    def save_rows(self, path: Path, table: Shard) -> None:
        """Move the rows, fewer than a batch, to the rank that writes the checkpoint."""
        self.world.at(f"writing {path.name}")
        gathered = self.exchange.move(path.name, table, torch.zeros_like(table.owner))
        if self.world.first:
            self.store.save(path, gathered.rows)

    def _known_everywhere(self, stage: Stage, table: Shard) -> bool:
        """Return True if a compute stage reads only index columns, so that each rank computes it for all rows."""
        inputs = self._reads(stage)
        if inputs is None:
            # A rank without rows cannot know whether others have an optional column.
            inputs = [*stage.reads, *(stage.optional if stage.scope is not Scope.GROUP else ())]
        return stage.kind is Kind.COMPUTE and stage.role is None and all(name in table.index for name in inputs)

    def _reads(self, stage: Stage) -> list[str] | None:
        """Return the columns that a stage of the flow reads; None for a stage of an evaluation or a session."""
        if self.any_stage or stage.name not in self.flow.inputs:
            return None
        return [column.name for column in self.flow.inputs[stage.name]]


Names = tuple[list[str], list[str]]


def united(low: Names, high: Names) -> Names:
    """Return the unions of two pairs of name sets."""
    return sorted({*low[0], *high[0]}), sorted({*low[1], *high[1]})


def same_columns(low: list[str], high: list[str]) -> list[str]:
    """Return the columns of two files of a recording, of which one may not exist. Raises ValueError if they differ."""
    if low and high and low != high:
        raise ValueError(f"machines have recorded different columns: {low}, {high}")
    return low or high


def rank_backend(backend: object) -> RankBackend:
    """Return the backend of a process that is one of several ranks."""
    assert isinstance(backend, RankBackend), "only these ranks are lost and come back"
    return backend

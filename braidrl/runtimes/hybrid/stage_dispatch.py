"""Dispatch: turns stages into calls. It picks the worker group, the rows of each rank, and the time of the start.

stage, Handle ──place──▶ group, rows of each rank ──begin──▶ Futures in an Output ──wait──▶ index columns
        └── without a role: deferred until its output is needed
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidrl.cluster.pools import GENERATE
from braidrl.data.packing import balanced_partition, in_turn
from braidrl.data.rows import Column, Rows
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.compute import summed
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import TraceWriter, traced
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.hybrid.group import WorkerGroup
from braidrl.runtimes.hybrid.handles import READ, CallResult, Future, Handle, Output, columns_read

Partition = Sequence[Sequence[int]]
"""The row positions of each rank, ascending."""


class StageDispatch:
    """Starts stages on the worker groups, and waits for them. Every role has a group; stages without a location run at `home`."""

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        home: WorkerGroup,
        executor: StageExecutor,
        trace: TraceWriter | None = None,
    ) -> None:
        self.groups, self.home, self.executor, self.trace = groups, home, executor, trace
        self.keys = itertools.count()
        self.forgotten: deque[tuple[WorkerGroup, int, int]] = deque()

    def _place(self, stage: Stage, table: Handle) -> tuple[WorkerGroup | None, Partition]:
        """Start, or for a compute stage wait for, the inputs of a stage; then return the result of `place`."""
        writers = table.writers(columns_read(stage))
        self._begin_deferred(writers)
        if stage.role is None:
            self._wait(writers)
        return place(stage, table, self.groups, self.home)

    def _begin(self, output: Output, group: WorkerGroup | None, parts: Partition, method: str, *more: Any) -> None:
        """Send a stage that writes columns to a group, to `home` for None."""
        assert output.table is not None
        group = group or self.home
        key, rows = next(self.keys), replace(output.table, parts=parts)
        reads = columns_read(output.stage)
        futures = group.call(method, rows, output.stage, output.iteration, key, *more, reads=reads)
        self._note(output, key, group, futures, parts)

    def _note(self, output: Output, key: int, group: WorkerGroup, futures: Sequence[Future], parts: Partition) -> None:
        """Record a started call; its workers free the rows when the futures have no more references here."""
        output.begin(key, group, futures, parts)
        for future in futures:
            weakref.finalize(future, self.forgotten.append, (group, future.worker, key)).atexit = False

    def _begin_deferred(self, outputs: Iterable[Output]) -> None:
        """Start the deferred stages: here if one reads and writes only index columns, else where its rows are."""
        for output in outputs:
            if not output.deferred:
                continue
            stage, table = output.stage, output.table
            assert table is not None
            group, parts = self._place(stage, table)
            columns: Mapping[str, Column] = {}
            if group is None:
                with traced(self.trace, "compute", stage.name, output.iteration, rows=len(table)):
                    columns = self.executor.run(stage, table.index, Sums())
            if columns and all(isinstance(column, Tensor) for column in columns.values()):
                output.index, output.table = Rows(columns), None
            else:
                totals = self._totals(output, group, parts) if stage.scope is Scope.BATCH else None
                self._begin(output, group, parts, "execute", totals)

    def _totals(self, output: Output, group: WorkerGroup | None, parts: Partition) -> dict[str, Tensor]:
        """Return a stage's sums over all rows, computed where each part is."""
        stage, table = output.stage, output.table
        assert table is not None
        if group is None:
            return summed(stage, table.index)
        called = group.call("sums", replace(table, parts=parts), stage, output.iteration, reads=columns_read(stage))
        totals: dict[str, Tensor] = {}
        for answer in group.wait(called):
            for name, value in (answer.result or {}).items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def _wait(self, outputs: Sequence[Output]) -> None:
        """Start the deferred outputs among these, then wait for all of them."""
        self._begin_deferred(outputs)
        for output in outputs:
            if output.index is None:
                output.finish(self._answers(output))

    def _answers(self, output: Output) -> list[CallResult]:
        """Wait for a stage, show its progress, and add its sums."""
        name = output.stage.name
        with self.executor.progress.stage(name, sum(len(future.part) for future in output.futures)) as bar:
            answers = output.group.wait(output.futures, lambda future: bar.update(len(future.part)))
        for answer in answers:
            output.sums.merge(Sums(answer.sums))
        output.sums.add(f"time/{name}", max((answer.seconds for answer in answers), default=0.0))
        return answers


def place(
    stage: Stage, table: Handle, groups: Mapping[str, WorkerGroup], home: WorkerGroup
) -> tuple[WorkerGroup | None, Partition]:
    """Return the group that runs a stage, and the rows of each of its ranks.

    Args:
        stage: A stage that writes columns; the inputs of a compute stage are complete.
        table: The rows that it reads.
        groups: The worker group of each role.
        home: The default group.

    Returns:
        A compute stage runs at `home`, where its payload is, with the rows of a group on one rank. If it reads only index columns the
        group is None, and the rows are those of `home`. Answers are verified where they were generated.
    """
    if stage.role is None:
        holders = [output for output in table.outputs if output.holds(columns_read(stage))]
        if holders and stage.scope is not Scope.GROUP:
            return _where(table, holders)
        divide = by_group if stage.scope is Scope.GROUP else by_length
        return home if holders else None, divide(table.index, home.mesh.size)
    if stage.type == "verify":
        tokens = f"{stage.params['of']}.tokens" if "of" in stage.params else "tokens"
        generated = generations(table, tokens)
        return _where(table, generated) if generated else (home, by_length(table.index, home.mesh.size))
    group = group_of(stage, groups)
    divide = by_prompt if stage.type == "generate" else by_length
    return group, divide(table.index, group.mesh.size)


def group_of(stage: Stage, groups: Mapping[str, WorkerGroup]) -> WorkerGroup:
    """Return the group that runs a stage of a role."""
    role = str(stage.role)
    return groups.get(role + GENERATE, groups[role]) if stage.kind is Kind.GENERATE else groups[role]


def generations(table: Handle, tokens: str) -> list[Output]:
    """Return the outputs that generated these tokens."""
    return [output for output in table.outputs if output.stage.type == "generate" and tokens in output.stage.writes]


def where_made(table: Handle) -> tuple[WorkerGroup, Partition]:
    """Return the group that generated or read the rows, and each row's worker in it."""
    read = [output for output in table.outputs if output.stage is READ]
    return _where(table, [*generations(table, "tokens"), *read])


def _where(table: Handle, outputs: Sequence[Output]) -> tuple[WorkerGroup, Partition]:
    """Return the group that computes the first of these outputs, and the worker of each row in one of them."""
    group: WorkerGroup = outputs[0].group
    # Rank 0 gets the rows of no worker of the group.
    ranks = [worker - group.first for worker in table.workers(outputs)]
    return group, rows_of_ranks([rank if 0 <= rank < group.mesh.size else 0 for rank in ranks], group.mesh.size)


def by_length(index: Rows, ranks: int, whole_groups: bool = False) -> Partition:
    """Partition rows by equal numbers of tokens, or of rows while lengths are unknown.

    Args:
        index: Index columns of the rows.
        ranks: Number of parts.
        whole_groups: Keep the rows of a group on one rank, for losses that compare them.
    """
    costs = index["length"].tolist() if "length" in index else [1.0] * len(index)
    return balanced_partition(costs, ranks, groups=index["group"].tolist() if whole_groups else None)


def by_group(index: Rows, ranks: int) -> Partition:
    """Partition groups by equal numbers of rows."""
    return balanced_partition([1.0] * len(index), ranks, groups=index["group"].tolist())


def by_prompt(index: Rows, ranks: int) -> Partition:
    """Partition rows to generate: all rows of a prompt on one rank, unless ranks would have no work."""
    costs, groups = index["prompt_length"].tolist(), index["group"].tolist()
    enough = len(set(groups)) >= ranks
    return balanced_partition(costs, ranks, groups=groups if enough else None, equal_size=True)


def by_number(index: Rows, ranks: int) -> Partition:
    """Partition rows of groups that may turn out not to be needed: every rank starts with the first groups."""
    return rows_of_ranks(in_turn(index["group"].tolist(), ranks), ranks)


def rows_of_ranks(rank_of: Iterable[int], ranks: int) -> Partition:
    """Return the rows of each rank, given the rank of each row."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for row, rank in enumerate(rank_of):
        parts[rank].append(row)
    return parts

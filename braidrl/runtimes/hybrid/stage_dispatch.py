"""Dispatch of a stage: the worker group that runs it, and the rows of each of the group's ranks."""

from collections.abc import Iterable, Mapping, Sequence

from braidrl.cluster.pools import GENERATE
from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Rows
from braidrl.flow import Kind, Scope, Stage
from braidrl.runtimes.hybrid.group import WorkerGroup
from braidrl.runtimes.hybrid.handles import READ, Handle, Output, columns_read

Partition = Sequence[Sequence[int]]
"""The row positions of each rank, ascending."""


def place(
    stage: Stage, table: Handle, groups: Mapping[str, WorkerGroup], home: WorkerGroup
) -> tuple[WorkerGroup | None, Partition]:
    """Return the group that runs a stage that writes columns, and the rows of each of its ranks.

    A compute stage, whose inputs are complete, runs at `home`, where its payload is, with the rows of a group on one rank. If it
    reads only index columns the group is None, and the rows are those of `home`. Answers are verified where they were generated.
    """
    if stage.role is None:
        holders = [output for output in table.outputs if output.holds(columns_read(stage))]
        if holders and stage.scope is not Scope.GROUP:
            return _where(table, holders)
        if stage.scope is not Scope.GROUP:
            return None, by_length(table.index, home.mesh.size)
        groups_of_rows = table.index["group"].tolist()
        parts = balanced_partition([1.0] * len(table), home.mesh.size, groups=groups_of_rows)
        return home if holders else None, parts
    if stage.type == "verify":
        tokens = f"{stage.params['of']}.tokens" if "of" in stage.params else "tokens"
        generated = generations(table, tokens)
        return _where(table, generated) if generated else (home, by_length(table.index, home.mesh.size))
    group = group_of(stage, groups)
    if stage.type != "generate":
        return group, by_length(table.index, group.mesh.size)
    # All rows of a prompt are generated on one rank, unless ranks would have no work.
    costs, prompts = table.index["prompt_length"].tolist(), table.index["group"].tolist()
    enough = len(set(prompts)) >= group.mesh.size
    return group, balanced_partition(costs, group.mesh.size, groups=prompts if enough else None, equal_size=True)


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
    """Partition rows by equal numbers of tokens, or of rows while lengths are unknown; `whole_groups` stay on one rank, for losses
    that compare their rows.
    """
    costs = index["length"].tolist() if "length" in index else [1.0] * len(index)
    return balanced_partition(costs, ranks, groups=index["group"].tolist() if whole_groups else None)


def rows_of_ranks(rank_of: Iterable[int], ranks: int) -> Partition:
    """Return the rows of each rank, given the rank of each row."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for row, rank in enumerate(rank_of):
        parts[rank].append(row)
    return parts

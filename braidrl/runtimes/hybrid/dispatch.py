"""Which group runs a stage, and which of its ranks gets which rows: pure functions of index columns and of where rows lie."""

from collections.abc import Mapping, Sequence

from braidrl.data.partition import balanced_partition, in_turn
from braidrl.data.rows import Rows
from braidrl.flow import Scope, Stage
from braidrl.runtimes.hybrid.group import WorkerGroup
from braidrl.runtimes.hybrid.handles import Handle, Output, columns_read

Partition = Sequence[Sequence[int]]
"""The row positions of each rank, rising."""


def place(
    stage: Stage, table: Handle, groups: Mapping[str, WorkerGroup], home: WorkerGroup
) -> tuple[WorkerGroup | None, Partition]:
    """Return the group that runs a stage, and the rows of each of its ranks.

    Args:
        stage: A stage that writes columns; of a compute stage all that it reads is there.
        table: The rows that it reads.
        groups: The worker group of each role.
        home: The group that runs what has no other place.

    Returns:
        A compute stage runs where the payload lies that it reads, with the rows of a group in one place, at `home`; the group is None
        where it reads index columns alone, and the rows are those of `home`. Answers are checked where they were generated.
    """
    if stage.role is None:
        holders = [output for output in table.outputs if output.holds(columns_read(stage))]
        if holders and stage.scope is not Scope.GROUP:
            return _where(table, holders)
        divide = by_group if stage.scope is Scope.GROUP else by_length
        return home if holders else None, divide(table.index, home.mesh.size)
    if stage.type == "verify":
        tokens = f"{stage.params['of']}.tokens" if "of" in stage.params else "tokens"
        generated = [o for o in table.outputs if o.stage.type == "generate" and tokens in o.stage.writes]
        return _where(table, generated) if generated else (home, by_length(table.index, home.mesh.size))
    group = groups[stage.role]
    divide = by_prompt if stage.type == "generate" else by_length
    return group, divide(table.index, group.mesh.size)


def _where(table: Handle, outputs: Sequence[Output]) -> tuple[WorkerGroup, Partition]:
    """Return the group that computes the first of these outputs, and each row where one of them lies."""
    group: WorkerGroup = outputs[0].group
    return group, in_place(table.workers(outputs), group.first, group.mesh.size)


def by_length(index: Rows, ranks: int, whole_groups: bool = False) -> Partition:
    """Divide rows into equal numbers of tokens, or of rows where their lengths are not known yet.

    Args:
        index: Index columns of the rows.
        ranks: Number of parts.
        whole_groups: Leave the rows of a group to one rank, for losses that compare them.
    """
    costs = index["length"].tolist() if "length" in index else [1.0] * len(index)
    return balanced_partition(costs, ranks, groups=index["group"].tolist() if whole_groups else None)


def by_group(index: Rows, ranks: int) -> Partition:
    """Divide groups into equal numbers of rows."""
    return balanced_partition([1.0] * len(index), ranks, groups=index["group"].tolist())


def by_prompt(index: Rows, ranks: int) -> Partition:
    """Divide rows to be generated: a prompt is computed by one rank for all of its rows, unless ranks would be left without work."""
    costs, groups = index["prompt_length"].tolist(), index["group"].tolist()
    enough = len(set(groups)) >= ranks
    return balanced_partition(costs, ranks, groups=groups if enough else None, equal_size=True)


def by_number(index: Rows, ranks: int) -> Partition:
    """Divide rows to be generated of groups that may turn out not to be needed: every rank begins with the first groups."""
    rank_of = in_turn(index["group"].tolist(), ranks)
    return [[row for row, owner in enumerate(rank_of) if owner == rank] for rank in range(ranks)]


def in_place(workers: Sequence[int], first: int, ranks: int) -> Partition:
    """Leave each row to the worker that holds it, and to rank 0 what no worker of the group holds.

    Args:
        workers: The worker of each row, by its number among all workers of the run.
        first: The number of the group's rank 0.
        ranks: Workers in the group.
    """
    rank_of = [worker - first if first <= worker < first + ranks else 0 for worker in workers]
    return [[row for row, owner in enumerate(rank_of) if owner == rank] for rank in range(ranks)]

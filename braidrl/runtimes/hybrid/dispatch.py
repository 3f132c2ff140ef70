"""Which rank of a group gets which rows of a table: pure functions of index columns and of where rows lie."""

from __future__ import annotations

from collections.abc import Sequence

from braidrl.data.partition import balanced_partition, in_turn
from braidrl.data.rows import Rows

Partition = Sequence[Sequence[int]]
"""The row positions of each rank, rising."""


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

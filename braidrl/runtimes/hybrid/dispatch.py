"""Which rank of a group gets which rows of a table: pure functions of index columns and of where rows lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from braidrl.data.partition import balanced_partition, in_turn
from braidrl.data.rows import Rows
from braidrl.runtimes.hybrid.handle import Layer

Deal = Callable[[int], Sequence[Sequence[int]]]
"""For a number of ranks, the row positions of each."""


def by_cost(costs: Sequence[float], groups: Sequence[int] | None = None) -> Deal:
    """Equal sums of costs; with `groups` those stay whole."""
    return lambda ranks: balanced_partition(costs, ranks, groups=groups)


def by_length(index: Rows, whole_groups: bool = False) -> Deal:
    """Equal numbers of tokens, or of rows where their lengths are not known yet."""
    costs = index["length"].tolist() if "length" in index else [1.0] * len(index)
    return by_cost(costs, index["group"].tolist() if whole_groups else None)


def by_prompt(index: Rows) -> Deal:
    """Rows to be generated: those of a prompt together, so that it is computed once, unless ranks would be left without work."""
    costs, groups = index["prompt_length"].tolist(), index["group"].tolist()

    def deal(ranks: int) -> list[list[int]]:
        together = len(set(groups)) >= ranks
        return balanced_partition(costs, ranks, groups=groups if together else None, equal_size=True)

    return deal


def by_number(index: Rows) -> Deal:
    """Rows to be generated of groups that may turn out not to be needed: every rank begins with the first groups."""
    groups = index["group"].tolist()

    def deal(ranks: int) -> list[list[int]]:
        rank_of = in_turn(groups, ranks)
        return [[row for row, owner in enumerate(rank_of) if owner == rank] for rank in range(ranks)]

    return deal


def in_place(layer: Layer, first: int) -> Deal:
    """Each row to the worker that holds it in `layer`; `first` is the number of rank 0. A row that nobody there holds goes to rank 0."""

    def deal(ranks: int) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for position, number in enumerate(layer.chunk.tolist()):
            rank = layer.chunks[number].worker - first if number >= 0 else 0
            rows[rank].append(position)
        return rows

    return deal

"""Where the parts of a layered drawing go, so that no box or label covers another. Pure geometry; knows nothing of flows.

Nodes stand in ranks, one below the other. A link goes from a node to one further down; ranks that it passes get a node without height,
so that every line runs only between neighbouring ranks and space is kept for it. Order within ranks: barycentres (Sugiyama, Tagawa and
Toda, 1981). Positions: least squares towards the neighbours under the order and the distances, solved by pooling adjacent violators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

ORDER_SWEEPS, PLACE_SWEEPS = 24, 200


@dataclass(eq=False)
class Node:
    """`width` is kept free around the centre `x`; a node without a name is a bend in a line."""

    rank: int
    width: float
    name: str = ""
    x: float = 0.0


@dataclass
class Layout:
    """Ranks from top to bottom, each from left to right, and lines between nodes of neighbouring ranks."""

    ranks: list[list[Node]]
    lines: list[tuple[Node, Node]] = field(default_factory=list)


def place(nodes: Sequence[Node], links: Mapping[Node, Sequence[Node]], gap: float, bend: float) -> Layout:
    """Orders and places nodes; `links` names the nodes that each one leads to. `bend` is the width kept for a passing line."""
    layout = Layout([[] for _ in range(1 + max(node.rank for node in nodes))])
    for node in nodes:
        layout.ranks[node.rank].append(node)
    for source, targets in links.items():
        add_trunk(layout, source, targets, bend)
    up, down = neighbours(layout.lines)
    best, fewest = [list(rank) for rank in layout.ranks], count_crossings(layout)
    for sweep in range(ORDER_SWEEPS):
        sort_ranks(layout.ranks if sweep % 2 == 0 else layout.ranks[::-1], up if sweep % 2 == 0 else down)
        crossings = count_crossings(layout)
        if crossings < fewest:
            best, fewest = [list(rank) for rank in layout.ranks], crossings
    layout.ranks = best
    assign_positions(layout, up, down, gap)
    return layout


def add_trunk(layout: Layout, source: Node, targets: Sequence[Node], bend: float) -> None:
    """One line from the source down to its furthest target, from which the others branch off in the rank above their own."""
    at = source
    for rank in range(source.rank + 1, 1 + max((node.rank for node in targets), default=0)):
        layout.lines += [(at, target) for target in targets if target.rank == rank]
        if any(target.rank > rank for target in targets):
            passing = Node(rank, bend)
            layout.ranks[rank].append(passing)
            layout.lines.append((at, passing))
            at = passing


Neighbours = dict[Node, list[Node]]


def neighbours(lines: Sequence[tuple[Node, Node]]) -> tuple[Neighbours, Neighbours]:
    """The nodes above and below each node."""
    up: Neighbours = defaultdict(list)
    down: Neighbours = defaultdict(list)
    for above, below in lines:
        up[below].append(above)
        down[above].append(below)
    return up, down


def sort_ranks(ranks: Sequence[list[Node]], beside: Neighbours) -> None:
    """Sorts each rank by the mean place of its nodes' neighbours in the rank before."""
    for before, rank in pairwise(ranks):
        place_of = {node: i / max(len(before) - 1, 1) for i, node in enumerate(before)}
        own = {node: i / max(len(rank) - 1, 1) for i, node in enumerate(rank)}
        rank.sort(key=lambda node: mean([place_of[n] for n in beside[node]], own[node]))


def count_crossings(layout: Layout) -> int:
    """Pairs of lines that cross."""
    place_of = {node: i for rank in layout.ranks for i, node in enumerate(rank)}
    by_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for above, below in layout.lines:
        by_rank[above.rank].append((place_of[above], place_of[below]))
    return sum(
        (a[0] - b[0]) * (a[1] - b[1]) < 0
        for ends in by_rank.values()
        for i, a in enumerate(ends)
        for b in ends[i + 1 :]
    )


def assign_positions(layout: Layout, up: Neighbours, down: Neighbours, gap: float) -> None:
    """Gives every node its `x`, 0 the left edge of the leftmost."""
    for rank in layout.ranks:
        spread(rank, [(0, 1)] * len(rank), gap)
    for sweep in range(PLACE_SWEEPS):
        for rank in layout.ranks if sweep % 2 == 0 else layout.ranks[::-1]:
            spread(rank, [pull(node, [*up[node], *down[node]]) for node in rank], gap)
    left = min(node.x - node.width / 2 for rank in layout.ranks for node in rank)
    for rank in layout.ranks:
        for node in rank:
            node.x -= left


def pull(node: Node, beside: Sequence[Node]) -> tuple[float, float]:
    """Where a node's neighbours want it and how strongly; a line that passes several ranks should do so straight."""
    weights = [(1 if node.name else 4) * (1 if other.name else 4) for other in beside]
    total = sum(weights)
    if not total:
        return node.x, 1
    return sum(other.x * weight for other, weight in zip(beside, weights, strict=True)) / total, total


def spread(rank: Sequence[Node], wanted: Sequence[tuple[float, float]], gap: float) -> None:
    """Moves the rank's nodes as near to the wanted (place, weight) as their order and distances allow."""
    if not rank:
        return
    offsets = [0.0]
    for left, right in pairwise(rank):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + gap)
    free = isotonic([x - offset for (x, _), offset in zip(wanted, offsets, strict=True)], [w for _, w in wanted])
    for node, x, offset in zip(rank, free, offsets, strict=True):
        node.x = x + offset


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values, in weighted least squares, that never fall."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while blocks and blocks[-1][0] > value:
            before, its_weight, its_count = blocks.pop()
            value = (before * its_weight + value * weight) / (its_weight + weight)
            weight, count = weight + its_weight, count + its_count
        blocks.append((value, weight, count))
    return [value for value, _, count in blocks for _ in range(count)]


def mean(numbers: Sequence[float], otherwise: float) -> float:
    """The mean, or `otherwise` of none."""
    return sum(numbers) / len(numbers) if numbers else otherwise

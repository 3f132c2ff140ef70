"""Partition of rows over ranks and into micro-batches: pure, deterministic functions of costs and groups, the same in
every runtime.

    rows ──▶ parts (ranks, workers) of equal cost ──▶ in each rank micro-batches of equal tokens, heaviest first

The algorithm is Karmarkar and Karp's largest differencing method (1982), for any number of parts. Each item starts as
its own division into parts, one of them not empty. The two divisions with the largest differences are merged, fullest
part on emptiest, until one is left. A merge never increases the difference, so the fullest and the emptiest part differ
by at most the largest item. It takes time in proportion to items times parts, and where this is above LARGE the largest
item left goes to the part that is cheapest then (LPT, Graham 1969): the same bound, about 1% over in place of 0.5% at
eight items a part, and a hundredth of the time for 8,192 items in 1,024 parts.

If all parts must have equally many items, the corresponding variant of this method cannot balance a long tail (parts of
32 log-normal lengths: 16% over the mean). The largest remaining item then goes to the cheapest part with space (0.2% on
the same lengths).

The first number of micro-batches is the least that could hold all tokens; while the fullest exceeds the limit, there is
one more. Unlike in RL2, rows are divided among the ranks first: the rank with the longest row gets fewer other rows,
which micro-batches of one size could not balance.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from braidrl.errors import UserError

LARGE = 1 << 16
"""Items times parts above which a partition is made in arrays."""


def balanced_partition(
    costs: Sequence[float], parts: int, *, equal_size: bool = False, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Divide items into `parts` of nearly equal cost (and `equal_size`), `groups` kept together; return positions,
    fullest first.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    if groups is None:
        return [sorted(items) for items in _divided(costs, parts, equal_size)]
    members = rows_by_group(groups)
    chosen = _divided([sum(costs[row] for row in rows) for rows in members], parts, equal_size)
    return [sorted(row for group in part for row in members[group]) for part in chosen]


def part_numbers(costs: np.ndarray, parts: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each item's part (B,) int64 in the division of `balanced_partition`: the fullest part is 0.

    Many items stay in arrays.
    """
    if groups is None and len(costs) * parts > LARGE:
        return _largest_first(costs, parts)
    numbers = np.zeros(len(costs), np.int64)
    divided = balanced_partition(costs.tolist(), parts, groups=None if groups is None else groups.tolist())
    for number, items in enumerate(divided):
        numbers[items] = number
    return numbers


def rows_by_group(groups: Sequence[Any]) -> list[list[int]]:
    """Return the positions of each group's rows, in the order of the groups' first rows."""
    members: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def equal_share(count: int, rank: int, size: int) -> range:
    """Return the share of one of `size` ranks in `count` items: equally many, consecutive."""
    return range(count * rank // size, count * (rank + 1) // size)


def in_turn(groups: Sequence[int] | np.ndarray, parts: int) -> np.ndarray:
    """Return the part of each row, round-robin by group number, so that each part starts early; the last groups are
    split evenly.
    """
    distinct, number = np.unique(np.asarray(groups, dtype=np.int64), return_inverse=True)
    full_rounds = len(distinct) // parts * parts
    part_of = number % parts
    left = (number >= full_rounds).nonzero()[0]
    part_of[left] = np.arange(len(left)) * parts // max(len(left), 1)
    return part_of


def imbalance(costs: Sequence[float], partition: Sequence[Sequence[int]]) -> float:
    """Return the fullest part's cost over the mean of all parts; 1 is perfect."""
    sums = [sum(costs[position] for position in part) for part in partition]
    return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0


def _divided(costs: Sequence[float], parts: int, equal_size: bool) -> list[list[int]]:
    if equal_size:
        return _fill_equally(costs, parts)
    if len(costs) * parts <= LARGE:
        return _differencing(costs, parts)
    part_of = _largest_first(np.asarray(costs), parts)
    by_part = np.argsort(part_of, kind="stable")
    return [items.tolist() for items in np.split(by_part, np.searchsorted(part_of[by_part], np.arange(1, parts)))]


def _fill_equally(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Assign items, largest first, to the cheapest part with space; numbers of items differ by at most one."""
    size, larger_parts = divmod(len(costs), parts)
    open_parts: list[tuple[float, int, list[int]]] = [(0, number, []) for number in range(parts)]
    closed: list[tuple[float, int, list[int]]] = []
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        cost, number, items = heapq.heappop(open_parts)
        while len(items) == size and not larger_parts:
            closed.append((cost, number, items))
            cost, number, items = heapq.heappop(open_parts)
        larger_parts -= len(items) == size
        items.append(item)
        part = (cost + costs[item], number, items)
        if len(items) > size:
            closed.append(part)
        else:
            heapq.heappush(open_parts, part)
    return [items for _, _, items in sorted(open_parts + closed, key=lambda part: (-part[0], part[1]))]


def _differencing(costs: Sequence[float], parts: int) -> list[list[int]]:
    # A part is (minus its cost, its first item, its items): sorted, the fullest comes first and ties go to the lowest
    # item.
    divisions = [(-cost, item, [(-cost, item, [item])]) for item, cost in enumerate(costs)]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        _, first, widest = heapq.heappop(divisions)
        _, lowest, second = divisions[0]
        # Merge the smaller division into the larger one: its fullest part into the other's emptiest, and so on.
        large, small = (widest, second) if len(widest) >= len(second) else (second, widest)
        untouched = parts - len(small)
        covered = large[untouched:]
        merged = large[:untouched]
        for position, part in enumerate(small):
            below = parts - 1 - position - untouched
            if below < len(covered):
                cost, item, items = covered[below]
                part = (cost + part[0], min(item, part[1]), items + part[2])
            insort(merged, part)
        # Fullest part minus emptiest; parts that are not listed are empty.
        emptiest = -merged[-1][0] if len(merged) == parts else 0
        heapq.heapreplace(divisions, (merged[0][0] + emptiest, min(first, lowest), merged))
    filled = [items for _, _, items in divisions[0][2]] if divisions else []
    return filled + [[] for _ in range(parts - len(filled))]


def _largest_first(costs: np.ndarray, parts: int) -> np.ndarray:
    """Assign items to parts, largest item first, each to the cheapest part; return the number of each item's part, of
    which the fullest is 0. Items are processed in blocks that do not change the result.
    """
    cost_of = costs.astype(np.float64)
    order, part_of, loads, start = (
        np.argsort(-cost_of, kind="stable"),
        np.empty(len(cost_of), np.int64),
        np.zeros(parts),
        0,
    )
    while start < len(cost_of):
        items = order[start : start + parts]
        cheapest = np.argsort(loads, kind="stable")[: len(items)]
        reached = np.minimum.accumulate(loads[cheapest] + cost_of[items])
        passed = np.flatnonzero(loads[cheapest[1:]] > reached[:-1])
        count = int(passed[0]) + 1 if len(passed) else len(items)
        part_of[items[:count]] = cheapest[:count]
        loads[cheapest[:count]] += cost_of[items[:count]]
        start += count
    number_of = np.empty(parts, np.int64)
    number_of[np.argsort(-loads, kind="stable")] = np.arange(parts)
    return number_of[part_of]


class Preferred(NamedTuple):
    """Costs of rows that micro-batches should share equally, and groups of rows that are less work together."""

    costs: Sequence[float]
    groups: Sequence[int] | None = None


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    uids: Sequence[Any] | None = None,
    groups: Sequence[int] | None = None,
    preferred: Preferred | None = None,
) -> list[list[int]]:
    """Divide a rank's rows, given their lengths, into micro-batches of at most `max_tokens`; return row positions by
    micro-batch.

    The heaviest comes first. Rows of one of `groups` share a micro-batch, as some losses need. Micro-batches have equal
    costs of `preferred`, with its groups whole, where that takes at most half as many more than equal tokens. Raises
    UserError, with its uid, for a row over the limit.
    """
    if groups is not None:
        # Plan with the sums of each group, then replace each group by its rows.
        members = rows_by_group(groups)
        names = [f"group {groups[rows[0]]}, which must stay whole," for rows in members]
        costs = preferred and Preferred([sum(preferred.costs[row] for row in rows) for rows in members])
        tokens = [sum(lengths[row] for row in rows) for rows in members]
        batches = plan_micro_batches(tokens, max_tokens, names, preferred=costs)
        return [sorted(row for item in batch for row in members[item]) for batch in batches]
    if (long := next((row for row, length in enumerate(lengths) if length > max_tokens), None)) is not None:
        uid = uids[long] if uids is not None else long
        name = uid if isinstance(uid, str) else f"row {uid}"
        raise UserError(
            f"{name} has {lengths[long]} tokens and trainer.max_tokens_per_device={max_tokens} is the most that one "
            "micro-batch holds; "
            f"write trainer.max_tokens_per_device={lengths[long]} or lower rollout.max_response_tokens"
        )
    count = max(1, -(-sum(lengths) // max_tokens))
    while (plan := _within(lengths, max_tokens, balanced_partition(lengths, count))) is None:
        count += 1
    if preferred is None:
        return plan
    groups = preferred.groups and _parts_of_groups(lengths, preferred.groups, max_tokens)
    plans = (balanced_partition(preferred.costs, more, groups=groups) for more in range(count, 3 * count // 2 + 1))
    return next(filter(None, (_within(lengths, max_tokens, each) for each in plans)), plan)


def _within(lengths: Sequence[int], max_tokens: int, plan: list[list[int]]) -> list[list[int]] | None:
    """Return the micro-batches of a plan that have rows, None if one is over the limit."""
    fits = all(sum(lengths[row] for row in part) <= max_tokens for part in plan)
    return [part for part in plan if part] if fits else None


def _parts_of_groups(lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> list[int]:
    """Return the number of each row's part of its group, of which each has at most `max_tokens`."""
    numbers, number = [0] * len(lengths), 0
    for rows in rows_by_group(groups):
        tokens = 0
        for row in rows:
            if tokens and tokens + lengths[row] > max_tokens:
                number, tokens = number + 1, 0
            numbers[row], tokens = number, tokens + lengths[row]
        number += 1
    return numbers

"""Micro-batches: whole rows packed up to a number of tokens, equally many on every rank.

    rows ──▶ ranks of equal cost ──▶ in each rank the same number of micro-batches, heaviest first

The number of micro-batches follows RL2's rule: the first multiple of the data-parallel size that is not below all tokens over
`max_tokens`; where the fullest is over the limit then, one data-parallel size more. Unlike there, rows are divided among the ranks
first: a rank that has the longest row gets less beside it, which micro-batches of one size could not make up for.
"""

from collections.abc import Sequence
from typing import Any, Literal

from braidrl.data.partition import balanced_partition
from braidrl.errors import UserError


def plan_micro_batches(
    lengths: Sequence[int], dp_size: int, max_tokens: int, costs: Sequence[float] | None = None,
    oversized: Literal["refuse", "alone"] = "refuse", uids: Sequence[Any] | None = None,
    groups: Sequence[int] | None = None,
) -> list[list[list[int]]]:  # fmt: skip
    """Divide rows into micro-batches, as many on each rank, none over the limit; some may be empty.

    Args:
        lengths: Tokens of each row.
        dp_size: Data-parallel ranks.
        max_tokens: The limit of a micro-batch.
        costs: What balances the ranks, by default the lengths.
        oversized: Whether a row over the limit raises UserError or is a micro-batch alone.
        uids: Names of the rows in messages, by default their positions.
        groups: Of each row, for losses that need the rows of a group in one micro-batch.

    Returns:
        Row positions by rank and micro-batch.
    """
    if groups is not None:
        return _plan_whole_groups(lengths, dp_size, max_tokens, costs, oversized, groups)
    long = [row for row, length in enumerate(lengths) if length > max_tokens]
    if long and oversized == "refuse":
        raise UserError(_too_long(lengths, long[0], max_tokens, uids))
    ranks = balanced_partition(lengths if costs is None else costs, dp_size)
    # Ranks wait for each other at every micro-batch, so all have as many as the one that needs most.
    count = -(-sum(lengths) // (max_tokens * dp_size))
    while True:
        plan = [_pack(lengths, rows, count, max_tokens) for rows in ranks]
        if all(rank is not None for rank in plan):
            return [rank for rank in plan if rank is not None]
        count += 1


def _plan_whole_groups(
    lengths: Sequence[int], dp_size: int, max_tokens: int, costs: Sequence[float] | None,
    oversized: Literal["refuse", "alone"], groups: Sequence[int],
) -> list[list[list[int]]]:  # fmt: skip
    """Plan groups in place of rows, then replace each group by its rows."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    rows_of = list(members.values())

    def sums(numbers: Sequence[Any]) -> list[Any]:
        return [sum(numbers[row] for row in rows) for rows in rows_of]

    names = [f"group {group}, which must stay whole," for group in members]
    plan = plan_micro_batches(
        sums(lengths), dp_size, max_tokens, None if costs is None else sums(costs), oversized, names
    )
    return [[sorted(row for item in batch for row in rows_of[item]) for batch in rank] for rank in plan]


def _pack(lengths: Sequence[int], rows: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Pack a rank's rows into `count` micro-batches, fullest first, or return None where they do not fit."""
    alone = [[row] for row in rows if lengths[row] > max_tokens]
    small = [row for row in rows if lengths[row] <= max_tokens]
    if len(alone) > count or (small and len(alone) == count):
        return None
    parts = balanced_partition([lengths[row] for row in small], count - len(alone)) if count > len(alone) else []
    if any(sum(lengths[small[i]] for i in part) > max_tokens for part in parts):
        return None
    # Heaviest first on every rank: micro-batches of like cost meet.
    alone.sort(key=lambda batch: -lengths[batch[0]])
    return alone + [[small[i] for i in part] for part in parts]


def _too_long(lengths: Sequence[int], row: int, max_tokens: int, uids: Sequence[Any] | None) -> str:
    uid = uids[row] if uids is not None else row
    name = uid if isinstance(uid, str) else f"row {uid}"
    return (
        f"{name} has {lengths[row]} tokens and trainer.max_tokens_per_device={max_tokens} is the most that one micro-batch holds; "
        f"write trainer.max_tokens_per_device={lengths[row]} or lower rollout.max_response_tokens"
    )

"""Which rows belong to which optimizer step: decided by group number and a seeded shuffle, never by who arrived first."""

from __future__ import annotations

from collections.abc import Sequence

from braidrl.algorithms.random import permutation
from braidrl.errors import UserError


def check_update_size(prompts_per_step: int, samples_per_prompt: int, rows_per_update: int | None) -> int:
    """Rows of one optimizer step (None is the whole batch). Raises UserError unless a batch is a whole number of updates."""
    rows = prompts_per_step * samples_per_prompt
    if rows_per_update is None:
        return rows
    if rows % rows_per_update:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        below = max(n for n in divisors if n < rows_per_update)
        above = min((n for n in divisors if n > rows_per_update), default=rows)
        raise UserError(
            f"trainer.rows_per_update={rows_per_update} does not divide the {rows} rows of a batch "
            f"(trainer.prompts_per_step={prompts_per_step} × rollout.samples_per_prompt={samples_per_prompt}); "
            f"write {' or '.join(str(n) for n in dict.fromkeys((below, above)))}"
        )
    return rows_per_update


def group_order(groups: Sequence[int], seed: int, iteration: int, epoch: int) -> list[int]:
    """The distinct groups of a batch in the order in which an epoch (from 0) trains on them."""
    distinct = sorted(set(groups))
    return [distinct[i] for i in permutation((seed, "updates", iteration, epoch), len(distinct)).tolist()]


def update_plan(
    groups: Sequence[int],
    samples: Sequence[int],
    *,
    rows_per_update: int,
    epochs: int,
    seed: int,
    iteration: int,
) -> list[list[int]]:
    """Row positions of each optimizer step, epoch after epoch; rows of one step are in the order of (group, sample).

    `groups` and `samples` are the index columns of the batch, in any order. Raises ValueError when the rows are no whole number of
    updates or when two rows have one identity.
    """
    identities = list(zip(groups, samples, strict=True))
    if len(set(identities)) < len(identities):
        raise ValueError("two rows of the batch have the same group and sample")
    if len(identities) % rows_per_update:
        raise ValueError(f"{len(identities)} rows are no whole number of updates of {rows_per_update} rows")
    updates: list[list[int]] = []
    for epoch in range(epochs):
        place = {group: i for i, group in enumerate(group_order(groups, seed, iteration, epoch))}
        shuffled = sorted(range(len(identities)), key=lambda row: (place[groups[row]], samples[row]))
        for start in range(0, len(shuffled), rows_per_update):
            updates.append(sorted(shuffled[start : start + rows_per_update], key=identities.__getitem__))
    return updates

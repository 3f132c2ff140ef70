"""The batches of a run: which rows belong to which optimizer step, and which weights it is trained on. `selecting` says which groups.

A seeded shuffle of a batch's groups, by their places among its numbers, makes its updates.

version  0            1            2            3          publications of a role's weights, one at the end of each iteration
batch    └─ 1 on 0 ──▶└─ 2 on 1 ──▶└─ 3 on 2 ──▶           iteration k trains batch k on version k - 1 and publishes version k

Staleness is the version that a batch is trained on less that of the oldest token. A role that skips an iteration (`when`) publishes
what it has, so that version and iteration keep step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from braidrl.algorithms.random import permutation
from braidrl.data.rows import Uid
from braidrl.errors import UserError
from braidrl.flow.selecting import GroupSelector


class Update(NamedTuple):
    """The rows of one optimizer step and its epoch."""

    epoch: int
    rows: tuple[Uid, ...]


@dataclass(frozen=True)
class Sizes:
    """As in the configuration; `rows_per_update` is never None here, and `epoch_groups` are the prompts of an epoch."""

    iterations: int
    prompts_per_step: int
    samples_per_prompt: int
    rows_per_update: int
    epochs: int = 1
    max_staleness: int = 0
    surplus: Literal["drop", "keep"] = "drop"
    epoch_groups: int = 1_000_000
    seed: int = 0
    over_sampling: float = 1.0
    older_groups: int | None = None
    """Groups of a batch that may be begun before the version that it is trained on, as far as `max_staleness` lets them; None is all."""
    sets_aside: bool = False
    """Whether rows may be set aside in one batch and go on in the next."""

    @property
    def ahead(self) -> int:
        """Return how many versions the weights that begin a batch's rows may lag behind; the last is left to rows that are set aside."""
        return self.max_staleness - self.sets_aside

    def sampling(self) -> GroupSelector:
        """Return the selection at the run's beginning."""
        return GroupSelector(
            self.prompts_per_step, self.epoch_groups, self.surplus, self.max_staleness, self.over_sampling
        )

    def updates(self, iteration: int, uids: Sequence[Uid]) -> list[Update]:
        """Return the optimizer steps of a batch, in order."""
        plan = update_plan(
            [uid[1] for uid in uids], [uid[2] for uid in uids],
            rows_per_update=self.rows_per_update, epochs=self.epochs, seed=self.seed, iteration=iteration,
            older=self.older_groups or 0,
        )  # fmt: skip
        per_epoch = len(plan) // self.epochs
        return [Update(n // per_epoch, tuple(uids[i] for i in rows)) for n, rows in enumerate(plan)]


def check_update_size(prompts_per_step: int, samples_per_prompt: int, rows_per_update: int | None) -> int:
    """Return the rows of one optimizer step (None is the whole batch). Raises UserError unless a batch is a whole number of updates."""
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


def update_plan(
    groups: Sequence[int], samples: Sequence[int], *, rows_per_update: int, epochs: int, seed: int, iteration: int,
    older: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Return the row positions of each optimizer step, epoch after epoch; rows of one step are in the order of (group, sample).

    Args:
        groups: Group of each row of the batch, in any order.
        samples: Sample of each row.
        rows_per_update: Rows of one step.
        epochs: Passes over the batch.
        seed: The run's.
        iteration: Number of the batch.
        older: How many groups, the first by number, are spread evenly over the updates.

    Raises:
        ValueError: The rows are no whole number of updates, or two rows have one identity.
    """
    identities = list(zip(groups, samples, strict=True))
    if len(set(identities)) < len(identities):
        raise ValueError("two rows of the batch have the same group and sample")
    if len(identities) % rows_per_update:
        raise ValueError(f"{len(identities)} rows are no whole number of updates of {rows_per_update} rows")
    distinct, updates = sorted(set(groups)), list[list[int]]()
    for epoch in range(epochs):
        order = evenly_mixed(permutation((seed, "updates", iteration, epoch), len(distinct)).tolist(), older)
        place = {distinct[group]: i for i, group in enumerate(order)}
        shuffled = sorted(range(len(identities)), key=lambda row: (place[groups[row]], samples[row]))
        for start in range(0, len(shuffled), rows_per_update):
            updates.append(sorted(shuffled[start : start + rows_per_update], key=identities.__getitem__))
    return updates


def evenly_mixed(order: Sequence[int], older: int) -> list[int]:
    """Return numbers in their order, but with those below `older` at equal distances among the others."""
    parts = [number for number in order if number < older], [number for number in order if number >= older]
    spread = [((place + 0.5) / len(part), number) for part in parts for place, number in enumerate(part)]
    return [number for _, number in sorted(spread, key=lambda pair: pair[0])]


class TooStale(RuntimeError):
    """Rows older than `max_staleness` reached training: admission let too much in."""


def trained_on(iteration: int) -> int:
    """Return the version whose weights iteration `iteration` (from 1) starts from."""
    return iteration - 1


def admissible(iteration: int, engine_version: int, max_staleness: int) -> bool:
    """Return whether prompts for the batch of `iteration` may be admitted while the engine holds `engine_version`.

    A row begun now has tokens of this version or later ones, whatever is loaded while it is generated.
    """
    return trained_on(iteration) - engine_version <= max_staleness


def check_staleness(iteration: int, versions: Sequence[int], max_staleness: int, uids: Sequence[Any]) -> int:
    """Return the largest staleness in a batch. Raises TooStale, naming the row, if it is over the bound or a version not yet published.

    Args:
        iteration: Number of the batch, from 1.
        versions: The version of each row's oldest token.
        max_staleness: The bound.
        uids: Names of the rows.
    """
    oldest = 0
    for uid, version in zip(uids, versions, strict=True):
        behind = trained_on(iteration) - version
        if not 0 <= behind <= max_staleness:
            raise TooStale(
                f"row {uid} has tokens of version {version}, and iteration {iteration} trains on version "
                f"{trained_on(iteration)} with max_staleness={max_staleness}"
            )
        oldest = max(oldest, behind)
    return oldest

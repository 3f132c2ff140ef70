"""The updates of a batch: assignment of rows to optimizer steps, and the bound on staleness. `selecting` chooses the
groups of a batch.

A seeded shuffle of a batch's groups, by rank among its group numbers, makes the updates.

version  0            1            2            3    publications of a role's weights, one at the end of each iteration
batch    └─ 1 on 0 ──▶└─ 2 on 1 ──▶└─ 3 on 2 ──▶     iteration k trains batch k on version k - 1 and publishes version k

Staleness is the version on which a batch is trained minus the version of its oldest token. A role that skips an
iteration (`when`) publishes its unchanged weights, so that versions and iterations stay aligned.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from braidrl.algorithms.random import permutation
from braidrl.data.rows import Uid
from braidrl.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """Batch sizes of a run, from the configuration; `rows_per_update` is never None, `epoch_groups` is the number of
    prompts per epoch.
    """

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
    """Number of groups of a batch that may start on an older version than the batch's own, within `max_staleness`; None
    means all.
    """
    partial_rollout: bool = False
    """True if rows may be suspended in one batch and resumed in the next (partial rollout)."""

    @property
    def ahead(self) -> int:
        """Return by how many versions the weights may lag at the start of a row; suspended rows need the last one of
        `max_staleness`.
        """
        return self.max_staleness - self.partial_rollout

    def updates(self, iteration: int, groups: Sequence[int], samples: Sequence[int]) -> list[list[int]]:
        """Return the row positions of each optimizer step of a batch, as `update_plan`."""
        return update_plan(
            groups,
            samples,
            rows_per_update=self.rows_per_update,
            epochs=self.epochs,
            seed=self.seed,
            iteration=iteration,
            older=self.older_groups or 0,
        )


def check_update_size(prompts_per_step: int, samples_per_prompt: int, rows_per_update: int | None) -> int:
    """Return the rows of one optimizer step; None is the whole batch. Raises UserError unless it divides the batch."""
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


def training_order(groups: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the positions of rows sorted by (group, sample), which they mostly are."""
    further = np.diff(groups)
    if ((further > 0) | ((further == 0) & (np.diff(samples) > 0))).all():
        return np.arange(len(groups))
    return np.lexsort((samples, groups))


def update_plan(
    groups: Sequence[int] | np.ndarray,
    samples: Sequence[int] | np.ndarray,
    *,
    rows_per_update: int,
    epochs: int,
    seed: int,
    iteration: int,
    older: int = 0,
) -> list[list[int]]:
    """Return the row positions of each optimizer step, epoch after epoch; rows of one step are in the order of (group,
    sample).

    `groups` and `samples` identify the rows of the batch, in any order. The first `older` groups by number are spread
    evenly over the updates. Raises ValueError if `rows_per_update` does not divide the batch, or two rows have the same
    identity.
    """
    numbers = np.stack([np.asarray(column, dtype=np.int64) for column in (groups, samples)])
    # Row i of the batch is row order[i] of those sorted by (group, sample).
    order = training_order(*numbers)
    if order.size and (np.diff(numbers[:, order]) == 0).all(0).any():
        raise ValueError("two rows of the batch have the same group and sample")
    if order.size % rows_per_update:
        raise ValueError(f"{order.size} rows are not a multiple of the update size of {rows_per_update} rows")
    if order.size == rows_per_update:
        return [order.tolist() for _ in range(epochs)]
    distinct, rank_of = np.unique(numbers[0], return_inverse=True)
    rank_in_order = np.empty_like(order)
    rank_in_order[order] = np.arange(order.size)
    updates = list[list[int]]()
    for epoch in range(epochs):
        shuffled = permutation((seed, "updates", iteration, epoch), len(distinct)).numpy()
        # Ranks below `older` are placed at equal distances among the others.
        parts = shuffled[shuffled < older], shuffled[shuffled >= older]
        spread = np.concatenate([(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts])
        mixed = np.concatenate(parts)[np.argsort(spread, kind="stable")]
        position = np.empty_like(mixed)
        position[mixed] = np.arange(len(mixed))
        rows = np.lexsort((numbers[1], position[rank_of]))
        for start in range(0, len(rows), rows_per_update):
            chosen = rows[start : start + rows_per_update]
            updates.append(chosen[np.argsort(rank_in_order[chosen])].tolist())
    return updates


class TooStale(RuntimeError):
    """Rows older than `max_staleness` reached training, because too many were admitted."""


def trained_on(iteration: int) -> int:
    """Return the version of the weights at the start of an iteration, counted from 1."""
    return iteration - 1


def admissible(iteration: int, engine_version: int, max_staleness: int) -> bool:
    """Return True if prompts for the batch of `iteration` may be admitted while the engine holds `engine_version`.

    A row that starts now has tokens of this version or later ones, even if the engine loads weights in between.
    """
    return trained_on(iteration) - engine_version <= max_staleness


def check_staleness(iteration: int, versions: Sequence[int], max_staleness: int, uids: Sequence[Any]) -> int:
    """Return the largest staleness in a batch, by each row's oldest version.

    Raises TooStale if one is over the bound or unpublished.
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


@dataclass
class TrainingBatch:
    """A batch under `streaming`, in the process that schedules it.

    Groups join as they become known, and trainers step as rows arrive.
    """

    iteration: int
    samples: int
    """Rows of a group."""
    size: int
    """Rows of an update."""
    plan: list[list[int]]
    """The updates of each row, by the position of its group and its sample."""
    steps: int
    """Optimizer steps of a train stage with a loss."""
    uids: list[Uid] = field(default_factory=list)
    is_known: bool = False
    """True if all of its groups have joined."""
    joined: dict[int, list[list[int]] | None] = field(default_factory=dict)
    """The groups in it, with the updates of each of their samples once these are certain."""
    steps_made: Counter[str] = field(default_factory=Counter)
    """Optimizer steps made, by train stage."""

    @staticmethod
    def planned(sizes: Sizes, iteration: int) -> "TrainingBatch":
        """Return a batch without rows, with its planned updates."""
        samples, rows = sizes.samples_per_prompt, sizes.prompts_per_step * sizes.samples_per_prompt
        if sizes.rows_per_update == rows:
            plan = [list(range(sizes.epochs))] * rows
            return TrainingBatch(iteration, samples, rows, plan, sizes.epochs)
        plan = [[] for _ in range(rows)]
        updates = sizes.updates(iteration, [n // samples for n in range(rows)], [n % samples for n in range(rows)])
        for number, step in enumerate(updates):
            for row in step:
                plan[row].append(number)
        return TrainingBatch(iteration, samples, sizes.rows_per_update, plan, len(updates))

    def updates_of(self, uids: Iterable[Uid]) -> list[list[int]]:
        """Return the updates of rows, which are certain."""
        return [(self.joined[group] or [])[sample] for _, group, sample in uids]


@dataclass
class UpdatesInProgress:
    """The updates of one train stage in a trainer.

    Its rows arrive in pieces, and accumulate in the order of updates.
    """

    steps: int
    size: int
    """Rows of an update."""
    steps_made: int = 0
    """Updates made, which the trainer counts."""
    _arrived: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, deque[tuple[Any, Sequence[int]]]] = field(default_factory=dict)

    def add(self, piece: Any, numbers: Sequence[Sequence[int]]) -> None:
        """Add the rows of a piece; `numbers` are the updates of each."""
        positions_of: Mapping[int, Sequence[int]]
        if numbers and numbers.count(numbers[0]) == len(numbers):
            # Mostly all rows have the same updates.
            positions_of = {number: range(len(numbers)) for number in numbers[0]}
        else:
            lists = defaultdict[int, list[int]](list)
            for position, row_updates in enumerate(numbers):
                for number in row_updates:
                    lists[number].append(position)
            positions_of = lists
        for number, positions in positions_of.items():
            self._arrived[number] += len(positions)
            self._waiting.setdefault(number, deque()).append((piece, positions))

    def take(self, complete_only: bool = False) -> list[tuple[Any, Sequence[int]]]:
        """Return the pieces of the current update, with positions, that have not been accumulated.

        With `complete_only` the list is empty until the update is complete.
        """
        return [] if complete_only and not self.is_complete else list(self._waiting.pop(self.steps_made, ()))

    @property
    def is_complete(self) -> bool:
        """Return True if all rows of the current update have arrived."""
        return self.steps_made < self.steps and self._arrived[self.steps_made] == self.size

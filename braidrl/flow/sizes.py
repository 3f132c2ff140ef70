"""The sizes that mean something for the result, and what follows from them: waves, and the optimizer steps of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from braidrl.flow.readiness import Uid
from braidrl.flow.updates import update_plan
from braidrl.flow.waves import GroupSelector


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

    def sampling(self) -> GroupSelector:
        """Selection at the run's beginning."""
        return GroupSelector(
            self.prompts_per_step, self.epoch_groups, self.surplus, self.max_staleness, self.over_sampling
        )

    def updates(self, iteration: int, uids: Sequence[Uid]) -> list[Update]:
        """The optimizer steps of a batch, in order."""
        plan = update_plan(
            [uid[1] for uid in uids],
            [uid[2] for uid in uids],
            rows_per_update=self.rows_per_update,
            epochs=self.epochs,
            seed=self.seed,
            iteration=iteration,
        )
        per_epoch = len(plan) // self.epochs
        return [Update(n // per_epoch, tuple(uids[i] for i in rows)) for n, rows in enumerate(plan)]

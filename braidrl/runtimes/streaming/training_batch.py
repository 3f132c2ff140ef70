"""A batch in training: its planned updates for the main process, and the updates in progress of a trainer.

kept group ── certain to be in the batch ──▶ joins ── position known well enough ──▶ its rows' updates ──▶ trainers

An update's rows follow from the positions of groups in the batch, which are planned before any group is known. A trainer receives each
row once, with the numbers of its updates, and makes these in order.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes


@dataclass
class TrainingBatch:
    """A batch in the main process."""

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
    made: Counter[str] = field(default_factory=Counter)
    """Optimizer steps made, by train stage."""

    @staticmethod
    def planned(sizes: Sizes, iteration: int) -> "TrainingBatch":
        """Return a batch without rows, with its planned updates."""
        samples, rows = sizes.samples_per_prompt, sizes.prompts_per_step * sizes.samples_per_prompt
        if sizes.rows_per_update == rows:
            plan = [list(range(sizes.epochs))] * rows
            return TrainingBatch(iteration, samples, rows, plan, sizes.epochs)
        places = [(0, n // samples, n % samples) for n in range(rows)]
        plan = [[] for _ in places]
        updates = sizes.updates(iteration, places)
        for number, step in enumerate(updates):
            for _, place, sample in step.rows:
                plan[place * samples + sample].append(number)
        return TrainingBatch(iteration, samples, sizes.rows_per_update, plan, len(updates))

    def updates_of(self, uids: Iterable[Uid]) -> list[list[int]]:
        """Return the updates of rows, which are certain."""
        return [(self.joined[group] or [])[sample] for _, group, sample in uids]

    def sure_updates(self, least: int, largest: int) -> list[list[int]] | None:
        """Return the updates of each row of a group, or None while they depend on which of these positions it will have."""
        found = [self.plan[place * self.samples : (place + 1) * self.samples] for place in range(least, largest + 1)]
        return found[0] if all(other == found[0] for other in found) else None


class UpdatesInProgress:
    """The updates of one train stage in a trainer. Its rows arrive in pieces, and accumulate in the order of updates."""

    def __init__(self, steps: int, size: int) -> None:
        self.steps, self.size, self.made = steps, size, 0
        self._arrived: Counter[int] = Counter()
        self._waiting: dict[int, deque[tuple[Any, list[int]]]] = {}

    def add(self, piece: Any, numbers: Sequence[Iterable[int]]) -> None:
        """Add the rows of a piece; `numbers` are the updates of each."""
        places: dict[int, list[int]] = {}
        for place, own in enumerate(numbers):
            for number in own:
                places.setdefault(number, []).append(place)
        for number, found in places.items():
            self._arrived[number] += len(found)
            self._waiting.setdefault(number, deque()).append((piece, found))

    def take(self, whole: bool = False) -> list[tuple[Any, list[int]]]:
        """Return the pieces of the current update, with positions, that have not accumulated; with `whole` only all at once."""
        if whole and not self.is_complete:
            return []
        return list(self._waiting.pop(self.made, ()))

    @property
    def is_complete(self) -> bool:
        """Return True if all rows of the current update have arrived."""
        return self.made < self.steps and self._arrived[self.made] == self.size

    @property
    def is_over(self) -> bool:
        """Return True after the last update."""
        return self.made == self.steps

    def stepped(self) -> None:
        """Record that the current update is made."""
        self.made += 1

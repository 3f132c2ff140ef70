"""A batch that grows while selection goes on: which of its rows are known, and which belong to which optimizer step.

kept group ── sure to be in the batch ──▶ its rows join ── place known well enough ──▶ their updates

An update's rows follow from the places of groups among those of the batch, which are planned before any group is known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from braidrl.flow.batches import Sizes
from braidrl.flow.flow import Flow, is_optimized
from braidrl.flow.readiness import Consumer, Uid
from braidrl.flow.stage import Kind


@dataclass
class PlannedUpdate:
    """An optimizer step: its epoch, the rows that are known to belong to it, and how many there will be."""

    epoch: int
    size: int
    rows: list[Uid] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether all of its rows are known."""
        return len(self.rows) == self.size


@dataclass
class TrainingBatch:
    """A batch, and for each train stage that runs in its iteration the updates that are left."""

    iteration: int
    samples: int
    """Rows of a group."""
    uids: list[Uid] = field(default_factory=list)
    is_known: bool = False
    """Whether all of its groups have joined."""
    updates: dict[str, list[PlannedUpdate]] = field(default_factory=dict)
    made: dict[str, list[PlannedUpdate]] = field(default_factory=dict)
    """Those that were made."""
    steps: int = 0
    """Optimizer steps of each stage with a loss."""
    plan: list[list[int]] = field(default_factory=list)
    """For each row, by the place of its group and its sample, the updates that it belongs to."""
    joined: dict[int, bool] = field(default_factory=dict)
    """The groups that are in it, and whether their rows are in their updates."""

    @staticmethod
    def planned(flow: Flow, sizes: Sizes, iteration: int) -> "TrainingBatch":
        """Return a batch without rows, with the updates that its rows will make."""
        batch = TrainingBatch(iteration, sizes.samples_per_prompt)
        stages = [stage for stage in flow.stages if stage.kind is Kind.TRAIN and stage.when.includes(iteration)]
        batch.updates = {stage.name: [] for stage in stages}
        optimized = [stage.name for stage in stages if is_optimized(stage)]
        if not optimized:
            return batch
        places = [(0, n // batch.samples, n % batch.samples) for n in range(sizes.prompts_per_step * batch.samples)]
        batch.plan = [[] for _ in places]
        steps = sizes.updates(iteration, places)
        for number, step in enumerate(steps):
            for _, place, sample in step.rows:
                batch.plan[place * batch.samples + sample].append(number)
        batch.steps = len(steps)
        batch.updates |= {name: [PlannedUpdate(step.epoch, len(step.rows)) for step in steps] for name in optimized}
        return batch

    def make_update(self, stage: str) -> None:
        """Note that the next update of a train stage is made; one without a loss has none."""
        if self.updates[stage]:
            self.made.setdefault(stage, []).append(self.updates[stage].pop(0))

    def take_back(self) -> None:
        """Let all updates be made again."""
        for stage, made in self.made.items():
            self.updates[stage] = [*made, *self.updates[stage]]
        self.made = {}

    def sure_updates(self, least: int, largest: int) -> list[list[int]] | None:
        """Return the updates of each row of a group, or None while they depend on which of these places it will have."""
        if not self.plan:
            return None
        found = [self.plan[place * self.samples : (place + 1) * self.samples] for place in range(least, largest + 1)]
        return found[0] if all(other == found[0] for other in found) else None

    def enter_updates(
        self, uids: Sequence[Uid], numbers: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Consumer, Uid, tuple[int, int]]]:
        """Put a group's rows into their updates; give for each the task and the table that it is taken from."""
        for name, left in self.updates.items():
            made = self.steps - len(left)
            for uid, own in zip(
                sorted(uids, key=lambda uid: uid[2]), numbers if left else [()] * len(uids), strict=True
            ):
                for number in own:
                    update = left[number - made]
                    update.rows.append(uid)
                    yield Consumer(name, update.epoch), uid, (self.iteration, 1 + self.steps - number)

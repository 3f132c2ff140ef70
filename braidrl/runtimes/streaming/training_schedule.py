"""Training and publication: the half of the streaming schedule that knows batches and no selection.

rows of a batch ──taken, acknowledged──▶ due_steps ──stepped──▶ ... last step ──▶ due_publication ──▶ publish ──▶ the next batch
                                             ▲                     │
                                             └──── train_again ────┘ a trainer was lost

A batch grows while selection continues. The updates of rows follow from their groups' positions in the batch, which are planned
before any group is known:

kept group ── certain to be in the batch ──▶ its rows join ── position known well enough ──▶ their updates
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from braidrl.flow.batches import Sizes
from braidrl.flow.flow import Flow, is_optimized
from braidrl.flow.readiness import Consumer, Uid, weights_wait_for
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.queue.tasks import Tasks

OWN_VERSION = 2
"""Added to the table number of rows that need an engine with the batch's own version."""
Taken = tuple[Consumer, tuple[int, int], Sequence[Uid]]
"""A task, the table to take rows from, and the rows of this update or batch if all are known."""


@dataclass
class PlannedUpdate:
    """An optimizer step: its epoch, its known rows, and their final number."""

    epoch: int
    size: int
    rows: list[Uid] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return True if all of its rows are known."""
        return len(self.rows) == self.size


@dataclass
class TrainingBatch:
    """A batch, and the remaining updates of each train stage that runs in its iteration."""

    iteration: int
    samples: int
    """Rows of a group."""
    uids: list[Uid] = field(default_factory=list)
    is_known: bool = False
    """True if all of its groups have joined."""
    updates: dict[str, list[PlannedUpdate]] = field(default_factory=dict)
    made: dict[str, list[PlannedUpdate]] = field(default_factory=dict)
    """Completed updates."""
    steps: int = 0
    """Optimizer steps of each stage with a loss."""
    plan: list[list[int]] = field(default_factory=list)
    """The updates of each row, by the position of its group and its sample."""
    joined: dict[int, bool] = field(default_factory=dict)
    """The groups in it, with True if their rows are in their updates."""

    @staticmethod
    def planned(flow: Flow, sizes: Sizes, iteration: int) -> "TrainingBatch":
        """Return a batch without rows, with its planned updates."""
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
        """Record that the next update of a train stage is made; a stage without a loss has none."""
        if self.updates[stage]:
            self.made.setdefault(stage, []).append(self.updates[stage].pop(0))

    def take_back(self) -> None:
        """Repeat all updates."""
        for stage, made in self.made.items():
            self.updates[stage] = [*made, *self.updates[stage]]
        self.made = {}

    def sure_updates(self, least: int, largest: int) -> list[list[int]] | None:
        """Return the updates of each row of a group, or None while they depend on which of these positions it will have."""
        if not self.plan:
            return None
        found = [self.plan[place * self.samples : (place + 1) * self.samples] for place in range(least, largest + 1)]
        return found[0] if all(other == found[0] for other in found) else None

    def enter_updates(
        self, uids: Sequence[Uid], numbers: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Consumer, Uid, tuple[int, int]]]:
        """Put a group's rows into their updates; return the task and table of each row."""
        for name, left in self.updates.items():
            made = self.steps - len(left)
            for uid, own in zip(
                sorted(uids, key=lambda uid: uid[2]), numbers if left else [()] * len(uids), strict=True
            ):
                for number in own:
                    update = left[number - made]
                    update.rows.append(uid)
                    yield Consumer(name, update.epoch), uid, (self.iteration, 1 + self.steps - number)


class TrainingSchedule:
    """The batches that are open or known. One trains at a time, and is complete when its version is published."""

    def __init__(self, flow: Flow, tasks: Tasks) -> None:
        """Begin without batches."""
        self.flow, self.tasks = flow, tasks
        self.weights_wait = weights_wait_for(flow)
        self.batches: dict[int, TrainingBatch] = {}
        self.trained = {stage.name: 0 for stage in flow.stages if stage.kind is Kind.TRAIN}
        """The last completed iteration of each train stage."""
        self.published = 0

    @property
    def coming(self) -> TrainingBatch | None:
        """Return the batch that trains next, as far as it is known."""
        return self.batches.get(self.published + 1)

    def turn(self, name: str) -> int:
        """Return the first iteration that a stage has not completed; a stage with a state takes rows of no later one."""
        iteration = self.published + 1
        while (batch := self.batches.get(iteration)) is not None and self.is_through(name, batch):
            iteration += 1
        return iteration

    def is_drawn(self, iteration: int) -> bool:
        """Return True if all rows of a batch have passed the recorded stages."""
        batch = self.batches[iteration]
        return all(self.is_through(stage.name, batch) for stage in self.flow.stages[: self.flow.recorded_stages])

    def is_through(self, name: str, batch: TrainingBatch) -> bool:
        """Return True if a stage has done, or skips, all rows of a batch."""
        if name in self.trained:
            return self.trained[name] >= batch.iteration or name not in batch.updates
        undone = self.tasks.tasks[Consumer(name)].undone
        return batch.is_known and not undone[batch.iteration, 1] and not undone[batch.iteration, 1 + OWN_VERSION]

    def rows_trained(self) -> tuple[int, int]:
        """Return the number of rows that the coming batch's updates have trained, over all roles and epochs, and their total."""
        batch, done, planned = self.coming, 0, 0
        if batch is None:
            return done, planned
        for name, left in batch.updates.items():
            made = sum(update.size for update in batch.made.get(name, ()))
            done, planned = done + made, planned + made + sum(update.size for update in left)
            for number, update in zip(range(len(left), 0, -1), left, strict=True):
                undone = self.tasks.tasks[Consumer(name, update.epoch)].undone
                done += len(update.rows) - undone[batch.iteration, 1 + number]
        return done, planned

    def due_steps(self) -> list[str]:
        """Return the train stages that shall make their next optimizer step.

        All its rows are acknowledged, and all readers of the weights are done. A train stage without a loss is due at its turn.
        """
        batch = self.coming
        if batch is None:
            return []
        return [name for name in batch.updates if not self.is_through(name, batch) and self._is_due(name, batch)]

    def stepped(self, stage: str) -> None:
        """Record a step; after its last update a stage has completed the batch."""
        batch = self.batches[self.published + 1]
        batch.make_update(stage)
        if not batch.updates[stage]:
            self.trained[stage] = batch.iteration

    def train_again(self) -> None:
        """Forget the training towards the next version; its trainers' leases have been released."""
        self.trained = dict.fromkeys(self.trained, self.published)
        if (batch := self.coming) is not None:
            batch.take_back()
            for consumer in self.tasks.tasks:
                if consumer.stage in batch.updates:
                    self.tasks.reopen(consumer, batch.uids)

    def due_publication(self) -> int | None:
        """Return the version to publish now, or None while rows or steps of its batch are pending."""
        batch = self.coming
        if batch is None:
            return None
        return batch.iteration if all(self.is_through(stage.name, batch) for stage in self.flow.stages) else None

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is complete."""
        self.published += 1
        return self.batches.pop(self.published)

    def update_to_take(self, stage: Stage) -> Taken | None:
        """Return the source of rows for a train stage's next update."""
        batch = self.coming
        if batch is None or not batch.updates.get(stage.name):
            return None
        left = batch.updates[stage.name]
        rows = left[0].rows if left[0].is_whole else ()
        return Consumer(stage.name, left[0].epoch), (batch.iteration, 1 + len(left)), rows

    def batch_to_take(self, stage: Stage) -> Taken | None:
        """Return the source of rows for a stage that needs a whole batch, or takes batches in order."""
        consumer, known = Consumer(stage.name), [batch for batch in self.batches.values() if batch.is_known]
        ready = self.tasks.tasks[consumer].ready
        batches = [b for b in known if not stage.state or b.iteration == self.turn(stage.name)]
        complete = (b for b in batches if len(ready.get((b.iteration, 1), ())) in taken_at_once(stage, b))
        return next(((consumer, (b.iteration, 1), b.uids) for b in complete), None)

    def has_its_weights(self, stage: Stage) -> bool:
        """Return True if the next batch's updates listed before a stage have been made."""
        before, batch = self.weights_wait[stage.name], self.coming
        return not before or (batch is not None and all(self.is_through(name, batch) for name in before))

    def _is_due(self, name: str, batch: TrainingBatch) -> bool:
        if not all(self.is_through(before, batch) for before in self.weights_wait[name]):
            return False
        left = batch.updates[name]
        if not left:
            return batch.is_known
        undone = self.tasks.tasks[Consumer(name, left[0].epoch)].undone[batch.iteration, 1 + len(left)]
        return left[0].is_whole and not undone


def taken_at_once(stage: Stage, batch: TrainingBatch) -> range:
    """Return how many rows, or groups, of a batch must be ready before a stage takes some."""
    rows = len(batch.uids)
    return range(rows, rows + 1) if stage.scope is Scope.BATCH else range(1, rows + 1)

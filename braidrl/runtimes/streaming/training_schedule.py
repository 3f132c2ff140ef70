"""What trains, and when a version is published: the half of the streaming schedule that knows batches and no selection.

rows of a batch ──taken, acknowledged──▶ due_steps ──stepped──▶ ... last step ──▶ due_publication ──▶ publish ──▶ the next batch
                                             ▲                     │
                                             └──── train_again ────┘ a trainer was lost

A batch grows while selection goes on. An update's rows follow from the places of groups among those of the batch, which are planned
before any group is known:

kept group ── sure to be in the batch ──▶ its rows join ── place known well enough ──▶ their updates
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from braidrl.flow.batches import Sizes
from braidrl.flow.flow import Flow, is_optimized
from braidrl.flow.readiness import Consumer, Uid, weights_wait_for
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.queue.tasks import Tasks

OWN_VERSION = 2
"""Added to the number of a table whose rows only an engine with the batch's own version may begin."""
Taken = tuple[Consumer, tuple[int, int], Sequence[Uid]]
"""A task, the table to take rows from, and the rows of the update or batch that this is if all are known."""


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


class TrainingSchedule:
    """The batches that are open or known; one is trained at a time, and is over when its version is published."""

    def __init__(self, flow: Flow, tasks: Tasks) -> None:
        """Begin without batches."""
        self.flow, self.tasks = flow, tasks
        self.weights_wait = weights_wait_for(flow)
        self.batches: dict[int, TrainingBatch] = {}
        self.trained = {stage.name: 0 for stage in flow.stages if stage.kind is Kind.TRAIN}
        """The last iteration that each train stage is through with."""
        self.published = 0

    @property
    def coming(self) -> TrainingBatch | None:
        """Return the batch that is trained next, as far as it is known."""
        return self.batches.get(self.published + 1)

    def turn(self, name: str) -> int:
        """Return the first iteration that a stage is not through with; one with a state does the rows of no later one."""
        iteration = self.published + 1
        while (batch := self.batches.get(iteration)) is not None and self.is_through(name, batch):
            iteration += 1
        return iteration

    def is_drawn(self, iteration: int) -> bool:
        """Return whether all rows of a batch have come through the stages at whose end they are recorded."""
        batch = self.batches[iteration]
        return all(self.is_through(stage.name, batch) for stage in self.flow.stages[: self.flow.recorded_stages])

    def is_through(self, name: str, batch: TrainingBatch) -> bool:
        """Return whether a stage has done, or leaves out, all rows of a batch."""
        if name in self.trained:
            return self.trained[name] >= batch.iteration or name not in batch.updates
        undone = self.tasks.tasks[Consumer(name)].undone
        return batch.is_known and not undone[batch.iteration, 1] and not undone[batch.iteration, 1 + OWN_VERSION]

    def rows_trained(self) -> tuple[int, int]:
        """Return through how many rows the updates of the coming batch are, in all roles and epochs, and how many they will take."""
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

        Every row of it is in, and whoever needs the weights is through. A train stage without a loss is due when its turn has come.
        """
        batch = self.coming
        if batch is None:
            return []
        return [name for name in batch.updates if not self.is_through(name, batch) and self._is_due(name, batch)]

    def stepped(self, stage: str) -> None:
        """Note that a step is made; after its last update a stage is through with the batch."""
        batch = self.batches[self.published + 1]
        batch.make_update(stage)
        if not batch.updates[stage]:
            self.trained[stage] = batch.iteration

    def train_again(self) -> None:
        """Forget what was trained towards the next version; those who held rows to train on have been given up."""
        self.trained = dict.fromkeys(self.trained, self.published)
        if (batch := self.coming) is not None:
            batch.take_back()
            for consumer in self.tasks.tasks:
                if consumer.stage in batch.updates:
                    self.tasks.reopen(consumer, batch.uids)

    def due_publication(self) -> int | None:
        """Return the version to publish now, or None while a stage has rows of its batch, or steps, still to do."""
        batch = self.coming
        if batch is None:
            return None
        return batch.iteration if all(self.is_through(stage.name, batch) for stage in self.flow.stages) else None

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is over."""
        self.published += 1
        return self.batches.pop(self.published)

    def update_to_take(self, stage: Stage) -> Taken | None:
        """Return where a train stage takes the rows of its next update."""
        batch = self.coming
        if batch is None or not batch.updates.get(stage.name):
            return None
        left = batch.updates[stage.name]
        rows = left[0].rows if left[0].is_whole else ()
        return Consumer(stage.name, left[0].epoch), (batch.iteration, 1 + len(left)), rows

    def batch_to_take(self, stage: Stage) -> Taken | None:
        """Return where a stage takes rows that needs a whole batch, or does one batch after the other."""
        consumer, known = Consumer(stage.name), [batch for batch in self.batches.values() if batch.is_known]
        ready = self.tasks.tasks[consumer].ready
        batches = [b for b in known if not stage.state or b.iteration == self.turn(stage.name)]
        complete = (b for b in batches if len(ready.get((b.iteration, 1), ())) in taken_at_once(stage, b))
        return next(((consumer, (b.iteration, 1), b.uids) for b in complete), None)

    def has_its_weights(self, stage: Stage) -> bool:
        """Return whether the updates have been made of the batch that is trained next which come before a stage in the list."""
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
    """Return how many rows, or groups, of a batch must be ready for a stage to take some."""
    rows = len(batch.uids)
    return range(rows, rows + 1) if stage.scope is Scope.BATCH else range(1, rows + 1)

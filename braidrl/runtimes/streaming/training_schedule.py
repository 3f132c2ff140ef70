"""What trains, and when a version is published: the half of the streaming schedule that knows batches and no selection.

rows of a batch ──taken, acknowledged──▶ due_steps ──stepped──▶ ... last step ──▶ due_publication ──▶ publish ──▶ the next batch
                                             ▲                     │
                                             └──── train_again ────┘ a trainer was lost
"""

from collections.abc import Sequence

from braidrl.flow.flow import Flow
from braidrl.flow.readiness import Consumer, Uid, weights_wait_for
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.queue.tasks import Tasks
from braidrl.runtimes.streaming.training_batch import TrainingBatch

OWN_VERSION = 2
"""Added to the number of a table whose rows only an engine with the batch's own version may begin."""
Taken = tuple[Consumer, tuple[int, int], Sequence[Uid]]
"""A task, the table to take rows from, and the rows of the update or batch that this is if all are known."""


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

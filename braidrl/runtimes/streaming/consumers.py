"""The consumers of a flow: where rows leave the queue. All other stages run beside one, without the queue.

actor.generate ─▶ verdicts ─▶ reference.log_probs
    ─▶ train.actor          consumers of the queue, and the main process's verdicts
  verify, shape    select       (a frozen model)      log_probs, advantage, update

* A generate stage, and an infer stage with devices of its own, is a consumer. So is an infer stage of a trained role
  that another group's stages need.
* Each trained role has one consumer, named `train.ROLE`: its remaining infer stages, its updates, and every computation
  they need.
* Computations before the selection, and checks, run beside the last consumer whose columns they need.
* Selection, and computations on whole groups before it, need only index columns: the main process runs them
  (`verdicts`).

`TrainingProgress` says which step a trainer may make next, and when a batch's version is published.

A row's bucket in a task says for which batch it is, and its state there:

    open, needs own version ──its group joins the batch──▶ in batch, in batch needs own version ──▶ done
    open ──suspended──▶ resumed, in the next batch
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Scope, Stage
from braidrl.flow.batches import TrainingBatch
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import is_optimized, waits_for, weights_wait_for
from braidrl.queue.tasks import Tasks

VERDICTS = "verdicts"


class RowState(IntEnum):
    """The state of a row in a batch. Tasks take the lowest first."""

    OPEN = 0
    """Its group may join the batch."""
    IN_BATCH = 1
    """Its group is in the batch; a trainer takes it once its updates are certain."""
    NEEDS_OWN_VERSION = 2
    """As OPEN; an engine needs the version on which the batch is trained."""
    IN_BATCH_NEEDS_OWN_VERSION = 3
    RESUMED = 4
    """It was suspended in an earlier batch, and continues once this one is open (partial rollout)."""

    # Buckets are keys of rows; Enum's own hash is a call of Python code.
    __hash__ = int.__hash__

    @staticmethod
    def of(in_batch: bool, needs_own_version: bool) -> "RowState":
        """Return the state of a row that was not suspended."""
        if needs_own_version:
            return RowState.IN_BATCH_NEEDS_OWN_VERSION if in_batch else RowState.NEEDS_OWN_VERSION
        return RowState.IN_BATCH if in_batch else RowState.OPEN


class Bucket(NamedTuple):
    """The key of a row's table within a task: rows of one batch in one state."""

    iteration: int
    state: RowState

    @property
    def in_batch(self) -> bool:
        """Return True if the rows' groups are in the batch."""
        return self.state in (RowState.IN_BATCH, RowState.IN_BATCH_NEEDS_OWN_VERSION)

    @property
    def needs_own_version(self) -> bool:
        """Return True if an engine needs the version on which the batch is trained."""
        return self.state in (RowState.NEEDS_OWN_VERSION, RowState.IN_BATCH_NEEDS_OWN_VERSION)


@dataclass(frozen=True)
class Consumer:
    """The stages that a worker group runs on a row in one visit, in the flow's order."""

    name: str
    kind: Kind
    group: str
    """Its worker group."""
    stages: tuple[Stage, ...]
    waits: frozenset[str] = frozenset()
    """The consumers and verdict stages that must process a row first."""

    def due(self, iteration: int) -> list[Stage]:
        """Return its stages that run in an iteration; iteration 0, an evaluation before the first, counts as the
        first.
        """
        return [stage for stage in self.stages if stage.when.includes(max(iteration, 1))]

    @property
    def updates(self) -> list[Stage]:
        """Return its train stages."""
        return [stage for stage in self.stages if stage.kind is Kind.TRAIN]

    @cached_property
    def takes_rows(self) -> bool:
        """Return False if it only copies weights."""
        return any(is_optimized(stage) or stage.kind is not Kind.TRAIN for stage in self.stages)


class Consumers:
    """All consumers of a flow by name, in the flow's order, and the verdict stages."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._waits = waits_for(flow)
        self._stage_order = {stage.name: position for position, stage in enumerate(flow.stages)}
        self._home: dict[str, str | None] = {}
        """The consumer of a stage, VERDICTS, or None: it runs wherever an update needs it."""
        for stage in flow.stages:
            self._home[stage.name] = self._home_of(stage)
        hosted = self._trained()
        self.by_name: dict[str, Consumer] = {}
        for stage in flow.stages:
            if stage.kind in (Kind.GENERATE, Kind.INFER) and self._home[stage.name] == stage.name:
                names = [s.name for s in flow.stages if self._home[s.name] == stage.name]
                group = f"{stage.role}.generate" if stage.kind is Kind.GENERATE else str(stage.role)
                parts = tuple(flow[name] for name in names)
                self.by_name[stage.name] = Consumer(stage.name, stage.kind, group, parts, self._waits_of(names))
        trains = [f"train.{role}" for role in hosted]
        for name, (role, stages) in zip(trains, hosted.items(), strict=True):
            parts = tuple(flow[stage] for stage in stages)
            self.by_name[name] = Consumer(name, Kind.TRAIN, role, parts, self._waits_of(stages))
        verdicts = [stage.name for stage in flow.stages if self._home[stage.name] == VERDICTS]
        self.verdicts = {name: self._waits_of([name]) for name in verdicts}
        """The consumers and verdict stages that each stage waits for."""
        self.of_stage = {stage.name: c.name for c in self.by_name.values() for stage in c.stages}
        self.reporting = {stage.name: name for name, c in reversed(self.by_name.items()) for stage in c.stages}
        """The consumer that reports a stage which several run: the first."""
        first = {name: self._stage_order[c.stages[0].name] for name, c in self.by_name.items() if name not in trains}
        first |= {name: self._stage_order[name] for name in verdicts}
        self.writers = [ADMISSION, *sorted(first, key=first.__getitem__), *trains]
        """All writers of columns, in the flow's order."""
        self.trainers = [c for c in self if c.kind is Kind.TRAIN]
        self.generating = [c.name for c in self if c.kind is Kind.GENERATE]
        self.selects = [stage.name for stage in flow.stages if stage.kind is Kind.SELECT]
        self.whole_batches = {c.name for c in self if any(s.scope is Scope.BATCH or s.state for s in c.stages)}
        """Consumers of whole batches, as one of their stages needs them or has a state."""
        self.recorded = [c.name for c in self if c.stages[0] in flow.stages[: flow.recorded_stages]]
        """Consumers of rows before they are recorded."""

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.by_name.values())

    def before(self, name: str) -> list[str]:
        """Return the writers of a row that is ready for a consumer or verdict stage: admission, then writers in the
        flow's order.
        """
        earlier, open_names = {ADMISSION}, [name]
        while open_names:
            consumer = open_names.pop()
            waits = self.by_name[consumer].waits if consumer in self.by_name else self.verdicts[consumer]
            open_names += waits - earlier - {ADMISSION}
            earlier |= waits
        return [writer for writer in self.writers if writer in earlier]

    def _home_of(self, stage: Stage) -> str | None:
        if stage.kind in (Kind.GENERATE, Kind.INFER):
            return stage.name
        if stage.kind is Kind.TRAIN:
            return f"train.{stage.role}"
        infers = [s.name for s in self.flow.stages if s.kind is Kind.INFER]
        is_early = stage in self.flow.sampling_segment or stage.type == "verify" or stage.name in self._needed(infers)
        if not is_early and self.flow.changed_roles:
            return None
        homes = {self._home[name] for name in self._needed([stage.name]) if name != stage.name}
        if stage.kind is Kind.SELECT or stage.scope is Scope.GROUP or VERDICTS in homes:
            return VERDICTS
        hosts = homes or {s.name for s in self.flow.stages if s.kind in (Kind.GENERATE, Kind.INFER)}
        chosen = sorted((home for home in hosts if home), key=self._stage_order.__getitem__)
        return chosen[-1] if homes else chosen[0]

    def _trained(self) -> dict[str, list[str]]:
        """Return the stages of each trained role's consumer; infer stages that no other group needs move into it."""
        flow, needed = self.flow, dict[str, list[str]]()
        for role in flow.changed_roles:
            updates = [s.name for s in flow.stages if s.kind is Kind.TRAIN and s.role == role]
            needed[role] = self._needed(updates, role)
        if not needed:
            return {}
        # Computations, and inference of trained roles, that no update needs are only recorded.
        assigned = {name for stages in needed.values() for name in stages}
        for stage in flow.stages:
            if stage.name not in assigned and self._home[stage.name] is None:
                role = [*needed, *flow.trained_roles][-1]
                needed[role] = self._needed([*needed[role], stage.name], role)
        for stage in flow.stages:
            role = str(stage.role)
            if stage.kind is not Kind.INFER or role not in needed or self._home[stage.name] != stage.name:
                continue
            # Another group, or a stage before the updates, needs its columns.
            early = [
                s.name for s in flow.stages if self._home[s.name] not in (None, stage.name) and s.kind is not Kind.TRAIN
            ]
            elsewhere = [*early, *(name for r, stages in needed.items() if r != role for name in stages)]
            if stage.name not in self._needed(elsewhere) and stage not in flow.sampling_segment:
                self._home[stage.name] = f"train.{role}"
                needed[role] = self._needed([*needed[role], stage.name], role)
        return needed

    def _needed(self, names: Iterable[str], role: str | None = None) -> list[str]:
        """Return these stages and all their transitive dependencies, in the flow's order; with `role` only those run
        with its updates.
        """
        needed, open_names = set[str](), list(names)
        while open_names:
            name = open_names.pop()
            if name not in needed:
                needed.add(name)
                waits = [writer for writer in self._waits[name] if writer != ADMISSION]
                open_names += [w for w in waits if role is None or self._home[w] in (None, f"train.{role}")]
        return sorted(needed, key=self._stage_order.__getitem__)

    def _waits_of(self, stages: Iterable[str]) -> frozenset[str]:
        """Return the consumers and verdict stages that these stages' rows come from."""
        names, writers = set(stages), {ADMISSION}
        for name in names:
            for writer in self._waits[name]:
                if writer == ADMISSION or writer in names or self.flow[writer].kind is Kind.TRAIN:
                    continue
                home = self._home[writer]
                if home is None or home.startswith("train."):
                    raise UserError(
                        f"runtime=streaming cannot run {name} in another process than {writer}; write runtime=eager"
                    )
                writers.add(writer if home == VERDICTS else home)
        return frozenset(writers)

    def tasks(self) -> Tasks:
        """Return empty tasks of the consumers and verdict stages."""
        waits = {c.name: c.waits for c in self if c.takes_rows} | self.verdicts
        in_groups = (c.name for c in self if any(stage.scope is Scope.GROUP for stage in c.stages))
        return Tasks(waits, [*self.verdicts, *in_groups])


class TrainingProgress:
    """The batches in training: the steps that may be made, and the weights that are due for publication."""

    def __init__(self, consumers: Consumers, tasks: Tasks) -> None:
        """Start without batches; `tasks` record which rows the consumers have completed."""
        self.flow, self.consumers, self.tasks = consumers.flow, consumers, tasks
        self.weights_wait = weights_wait_for(self.flow)
        self.batches: dict[int, TrainingBatch] = {}
        """The batches that are open or known. One trains at a time, and is complete when its version is published."""
        self.published = 0

    @property
    def coming(self) -> TrainingBatch | None:
        """Return the batch that trains next, as far as it is known."""
        return self.batches.get(self.published + 1)

    def publish(self) -> TrainingBatch:
        """Return the batch whose version is published now."""
        self.published += 1
        return self.batches.pop(self.published)

    def may_step(self, stage: Stage) -> bool:
        """Return True if a trainer may make its next step: no other worker still needs the weights that it uses or
        changes.

        The trainer itself waits for the rows of the step, and for earlier stages on it.
        """
        batch = self.coming
        if batch is None or not stage.when.includes(batch.iteration) or self._is_made(stage, batch):
            return False
        consumer_of = self.consumers.of_stage
        foreign = [name for name in self.weights_wait[stage.name] if consumer_of[name] != consumer_of[stage.name]]
        return (is_optimized(stage) or batch.is_known) and all(self.is_through(name, batch) for name in foreign)

    def stepped(self, stage: str) -> None:
        """Record an optimizer step, or a copy of weights."""
        self.batches[self.published + 1].steps_made[stage] += 1

    def train_again(self) -> None:
        """Reset training towards the next version; its trainers' leases have been released."""
        if (batch := self.coming) is not None:
            batch.steps_made.clear()
            for consumer in self.consumers.trainers:
                if consumer.takes_rows:
                    done = [uid for uid in batch.uids if uid in self.tasks.written[consumer.name]]
                    self.tasks.unwrite(consumer.name, done)
                    self.tasks[consumer.name].reopen(done)

    def due_publication(self) -> int | None:
        """Return the version to publish now, or None while rows or steps of its batch are pending."""
        batch = self.coming
        if batch is None or not batch.is_known:
            return None
        stages = (
            stage
            for consumer in self.consumers.trainers
            for stage in consumer.updates
            if stage.when.includes(batch.iteration)
        )
        if not all(self._is_made(stage, batch) for stage in stages):
            return None
        return batch.iteration if all(self._is_done(name, batch) for name in self.tasks.tasks) else None

    def is_drawn(self, iteration: int) -> bool:
        """Return True if all rows of a batch have passed the recorded stages."""
        batch = self.batches[iteration]
        return batch.is_known and all(self._is_done(name, batch) for name in self.consumers.recorded)

    def is_through(self, stage: str, batch: TrainingBatch) -> bool:
        """Return True if a stage has completed, or skips, all rows of a batch."""
        declared = self.flow[stage]
        if declared.kind is Kind.TRAIN:
            return not declared.when.includes(batch.iteration) or self._is_made(declared, batch)
        return batch.is_known and self._is_done(self.consumers.of_stage[stage], batch)

    def rows_trained(self) -> tuple[int, int]:
        """Return the number of rows that the next batch's updates have trained, over all roles and epochs, and their
        total.
        """
        if (batch := self.coming) is None:
            return 0, 0
        stages = [
            s.name
            for c in self.consumers.trainers
            for s in c.updates
            if is_optimized(s) and s.when.includes(batch.iteration)
        ]
        return sum(batch.steps_made[name] for name in stages) * batch.size, len(stages) * batch.steps * batch.size

    def _is_made(self, stage: Stage, batch: TrainingBatch) -> bool:
        return batch.steps_made[stage.name] >= (batch.steps if is_optimized(stage) else 1)

    def _is_done(self, name: str, batch: TrainingBatch) -> bool:
        """Return True if a consumer has completed all rows of a batch."""
        undone = self.tasks[name].undone
        joined = RowState.IN_BATCH, RowState.IN_BATCH_NEEDS_OWN_VERSION
        return not any(undone[Bucket(batch.iteration, state)] for state in joined)

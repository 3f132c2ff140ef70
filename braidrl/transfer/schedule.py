"""The streaming runtime's decisions as one state machine: who may admit, take, step and publish now. No clock, no socket, no payload.

    groups_wanted ─▶ admit ─▶ [rows: written, consumed, leased] ◀─ take, acknowledge, select ─ workers
          ▲                        │ close: the batch is known
          └── published ◀── due_publication ◀── due_steps ◀── updates whose rows are all acknowledged

The runtime and the simulator drive the same object; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from braidrl.flow.flow import Flow, is_optimized
from braidrl.flow.readiness import Consumer, StageProgress, Uid, weights_wait_for
from braidrl.flow.sizes import Sizes, Update
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.flow.versions import admissible, check_staleness, trained_on
from braidrl.flow.waves import GroupSelector, Selection, Verdict
from braidrl.transfer.leases import Lease, Leases


@dataclass
class Batch:
    """A batch whose groups are known, and for each train stage that runs in its iteration the updates that are left."""

    iteration: int
    uids: list[Uid]
    updates: dict[str, list[Update]] = field(default_factory=dict)


class StreamSchedule:
    """What is decided in streaming, over all rows in work."""

    def __init__(self, flow: Flow, sizes: Sizes) -> None:
        self.flow, self.sizes = flow, sizes
        self.progress = StageProgress(flow, sizes.epochs)
        self.leases = Leases()
        self.sampling = sizes.sampling()
        self.weights_wait = weights_wait_for(flow)
        self.selects = [stage.name for stage in flow.stages if stage.kind is Kind.SELECT]
        self.batches: dict[int, Batch] = {}
        self.rows_of: dict[int, list[Uid]] = {}
        self.iteration_of: dict[int, int] = {}
        """Of each group: the batch that it was admitted for, then the one that it is in."""
        self.versions: dict[Uid, int] = {}
        """The oldest version among a row's tokens, once it is generated."""
        self.trained = {stage.name: 0 for stage in flow.stages if stage.kind is Kind.TRAIN}
        """The last iteration that each train stage is through with."""
        self.published = self.opened = 0
        self.is_open = False
        self.max_staleness_seen = 0

    def resume(self, done: int, sampling: GroupSelector, surplus: Mapping[Uid, int]) -> None:
        """Goes on after `done` iterations, with the selection's state and the versions of surplus rows that wait."""
        self.published = self.opened = done
        self.trained = dict.fromkeys(self.trained, done)
        self.sampling = sampling
        self.progress.admit(list(surplus))
        for stage in self.flow.sampling_segment:
            self.progress.skip(stage.name, list(surplus))
        for uid, version in surplus.items():
            self.rows_of.setdefault(uid[1], []).append(uid)
            self.iteration_of[uid[1]] = done
            self.versions[uid] = version

    # Admission

    def groups_wanted(self, engine_version: int) -> int:
        """How many groups to admit now, while engines begin rows with `engine_version` or later."""
        if not self.is_open:
            opening = self.opened + 1
            if opening > self.sizes.iterations or not admissible(opening, engine_version, self.sizes.max_staleness):
                return 0
            self.opened, self.is_open = opening, True
            self.sampling.begin(trained_on(opening))
        return self.sampling.next_wave()

    def admit(self, uids: Sequence[Uid]) -> None:
        """The rows of a wave are born; group numbers rise."""
        self.progress.admit(uids)
        groups = list(dict.fromkeys(group for _, group, _ in uids))
        for uid in uids:
            self.rows_of.setdefault(uid[1], []).append(uid)
        self.iteration_of.update(dict.fromkeys(groups, self.opened))
        self._skip(self.flow.sampling_segment, uids)
        self.sampling.admit(groups)
        if not self.selects:
            self.sampling.decide({group: Verdict() for group in groups})

    def close(self) -> Selection | None:
        """Ends selection for the open batch if it is complete; the rows of released groups are forgotten."""
        known = self.is_open and self.sampling.batch() is not None
        if not known or (self.sampling.surplus == "keep" and self.sampling.pending):
            return None
        outcome = self.sampling.finish()
        self.is_open = False
        self._forget(outcome.released)
        self.iteration_of.update(dict.fromkeys(outcome.groups, self.opened))
        batch = Batch(self.opened, [uid for group in outcome.groups for uid in self.rows_of[group]])
        for stage in self.flow.stages:
            if stage.kind is Kind.TRAIN and stage.when.includes(batch.iteration):
                updates = self.sizes.updates(batch.iteration, batch.uids) if is_optimized(stage) else []
                batch.updates[stage.name] = updates
        self._skip(self.flow.stages[len(self.flow.sampling_segment) :], batch.uids)
        self.batches[self.opened] = batch
        return outcome

    def is_generation_over(self) -> bool:
        """True between two batches: nothing is being generated or could be, so that all engines can load weights at once."""
        stages = [stage.name for stage in self.flow.stages if stage.kind is Kind.GENERATE]
        return not self.is_open and all(self.progress.is_written(name, self.progress.uids) for name in stages)

    # Work

    def take(
        self,
        stage: str,
        holder: str,
        now: float,
        seconds: float,
        most: int,
        whole_update: bool = False,
        engine_version: int | None = None,
    ) -> Lease | None:
        """Leases up to `most` ready rows to a holder for so many seconds (whole groups and batches by scope), or None.

        With `whole_update` a train stage gets all rows of its next optimizer step at once, as some losses need them. An engine
        whose version lags behind (`engine_version`) gets no rows that would be too old when they are trained.
        """
        consumer, rows = self._rows_for(self.flow[stage], most, whole_update)
        if engine_version is not None and rows:
            iteration = self.iteration_of[rows[0][1]]
            if not admissible(iteration, engine_version, self.sizes.max_staleness):
                return None
        if not rows:
            return None
        if self.flow[stage].kind is Kind.TRAIN:
            versions = [self.versions[row] for row in rows]
            stale = check_staleness(self.published + 1, versions, self.sizes.max_staleness, rows)
            self.max_staleness_seen = max(self.max_staleness_seen, stale)
        self.progress.consume(consumer, rows)
        return self.leases.take(consumer, holder, rows, now, seconds)

    def acknowledge(self, number: int, now: float, version: int | None = None) -> Lease:
        """A lease's rows are done and written; `version` is the oldest that generated them. Raises LeaseLost."""
        lease = self.leases.acknowledge(number, now)
        stage = self.flow[lease.consumer.stage]
        if stage.kind is not Kind.TRAIN:
            self.progress.write(stage.name, lease.rows)
        if stage.kind is Kind.GENERATE and version is not None:
            self.versions.update({row: min(version, self.versions.get(row, version)) for row in lease.rows})
        return lease

    def select(self, number: int, now: float, reasons: dict[int, str | None]) -> Lease:
        """A select stage's verdicts (None keeps) on the groups of a lease. Raises LeaseLost."""
        lease = self.leases.acknowledge(number, now)
        name = lease.consumer.stage
        self.progress.write(name, [row for row in lease.rows if reasons[row[1]] is None])
        for group, reason in reasons.items():
            if reason is not None or name == self.selects[-1]:
                version = min(self.versions[row] for row in self.rows_of[group])
                self.sampling.decide({group: Verdict(reason, version)})
        return lease

    def fail_holder(self, holder: str) -> None:
        """A worker is gone: what it held is free again."""
        self._give_back(self.leases.fail_holder(holder))

    def expire(self, now: float) -> None:
        """What has been held for too long is free again."""
        self._give_back(self.leases.expire(now))

    def turn(self, name: str) -> int:
        """The first iteration that a stage is not through with; one with a state does the rows of no later one."""
        iteration = self.published + 1
        while (batch := self.batches.get(iteration)) is not None and self._is_through(name, batch):
            iteration += 1
        return iteration

    # Training

    def due_steps(self) -> list[str]:
        """Train stages that shall make their next optimizer step: every row is in, and whoever needs the weights is through.

        A train stage without a loss is due when its turn has come.
        """
        batch = self.batches.get(self.published + 1)
        if batch is None:
            return []
        return [name for name in batch.updates if not self._is_through(name, batch) and self._is_due(name, batch)]

    def stepped(self, stage: str) -> None:
        """The step is made; after its last update a stage is through with the batch."""
        batch = self.batches[self.published + 1]
        if batch.updates[stage]:
            batch.updates[stage].pop(0)
        if not batch.updates[stage]:
            self.trained[stage] = batch.iteration

    def due_publication(self) -> int | None:
        """The version to publish now: every train stage is through with its batch, and no stage has its rows still to do."""
        batch = self.batches.get(self.published + 1)
        if batch is None:
            return None
        return batch.iteration if all(self._is_through(stage.name, batch) for stage in self.flow.stages) else None

    def publish(self) -> Batch:
        """The due version is published; its batch is over and its rows are forgotten."""
        self.published += 1
        batch = self.batches.pop(self.published)
        self._forget(dict.fromkeys(uid[1] for uid in batch.uids))
        return batch

    def _is_due(self, name: str, batch: Batch) -> bool:
        if not all(self._is_through(before, batch) for before in self.weights_wait[name]):
            return False
        left = batch.updates[name]
        return not left or self.leases.is_done(Consumer(name, left[0].epoch), left[0].rows)

    def _is_through(self, name: str, batch: Batch) -> bool:
        """True if a stage has done, or leaves out, all rows of a batch."""
        if name in self.trained:
            return self.trained[name] >= batch.iteration or name not in batch.updates
        return self.progress.is_written(name, batch.uids)

    def _rows_for(self, stage: Stage, most: int, whole_update: bool) -> tuple[Consumer, list[Uid]]:
        consumer = Consumer(stage.name)
        if stage.kind is Kind.TRAIN:
            batch = self.batches.get(self.published + 1)
            if batch is None or not batch.updates.get(stage.name):
                return consumer, []
            update = batch.updates[stage.name][0]
            consumer = Consumer(stage.name, update.epoch)
            ready = self.progress.ready(consumer, update.rows)
            if whole_update:
                return consumer, ready if len(ready) == len(update.rows) else []
            return consumer, ready[:most]
        if stage.scope is Scope.BATCH or stage.state:
            known = [b for b in self.batches.values() if not stage.state or b.iteration == self.turn(stage.name)]
            ready = next((rows for batch in known if (rows := self.progress.ready(consumer, batch.uids))), [])
            return consumer, ready if stage.scope is Scope.BATCH else self._first_portion(stage, ready, most)
        return consumer, self._first_portion(stage, self.progress.ready(consumer), most)

    def _first_portion(self, stage: Stage, ready: list[Uid], most: int) -> list[Uid]:
        """Rows of the earliest batch that has any; whole groups where the scope asks for them, and at least one."""
        # Inference with weights that change belongs to the version that the batch is trained on, and to its place in the list.
        if stage.kind is Kind.INFER and stage.role in self.flow.changed_roles:
            ready = [uid for uid in ready if self.iteration_of[uid[1]] == self.published + 1]
            batch, before = self.batches.get(self.published + 1), self.weights_wait[stage.name]
            if before and (batch is None or not all(self._is_through(name, batch) for name in before)):
                return []
        first = min((self.iteration_of[uid[1]] for uid in ready), default=0)
        rows = [uid for uid in ready if self.iteration_of[uid[1]] == first]
        if stage.scope is not Scope.GROUP or len(rows) <= most:
            return rows[:most]
        groups = list(dict.fromkeys(uid[1] for uid in rows))
        whole = max(1, most // self.sizes.samples_per_prompt)
        return [uid for uid in rows if uid[1] in groups[:whole]]

    def _skip(self, stages: Iterable[Stage], uids: Sequence[Uid]) -> None:
        """Stages that `when` leaves out of the open iteration leave out these rows."""
        for stage in stages:
            if stage.kind is not Kind.TRAIN and not stage.when.includes(self.opened):
                self.progress.skip(stage.name, uids)

    def _give_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.progress.give_back(lease.consumer, [row for row in lease.rows if row in self.progress.position])

    def _forget(self, groups: Iterable[int]) -> None:
        uids = [uid for group in groups for uid in self.rows_of.pop(group)]
        lost = self.leases.forget(uids)
        self.progress.forget(uids)
        self._give_back(lost)
        for uid in uids:
            self.versions.pop(uid, None)
            self.iteration_of.pop(uid[1], None)

"""The decisions of the streaming runtime as one state machine: admission, leases, steps, publications. No clock, no socket, no payload.

    groups_wanted ─▶ admit ─▶ [rows: written, consumed, leased] ◀─ take, acknowledge, select ─ workers
          ▲                        │ close: the batch is known
          └── published ◀── due_publication ◀── due_steps ◀── updates whose rows are all acknowledged

The runtime and the simulator drive the same object; time is an argument.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from braidrl.flow.batches import Sizes, admissible, check_staleness, trained_on
from braidrl.flow.flow import ADMISSION, Flow, is_optimized
from braidrl.flow.readiness import Consumer, Uid, waits_for
from braidrl.flow.selecting import UNFINISHED, GroupSelector, Selection, Verdict, begun_too_many, waiting_groups
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.queue.samplers import FIRST_IN, Candidate, Sampler
from braidrl.queue.tasks import Lease, Tasks
from braidrl.runtimes.streaming.training_schedule import OWN_VERSION, Taken, TrainingBatch, TrainingSchedule

SET_ASIDE = 4
"""Table number of rows that continue once the batch of their iteration is open."""


class UnfinishedRow(NamedTuple):
    """A checkpoint's entry of a row in work: the oldest version among its tokens (None without tokens), and whether it has ended."""

    version: int | None
    has_ended: bool


class StreamSchedule(TrainingSchedule):
    """The schedule of all rows in work.

    A stage, or an epoch of a train stage, is a task. Its rows are in the table (iteration, 0) while their batch is open, then in
    (iteration, 1); those of a train stage are in one table per optimizer step, (iteration, 1 + remaining steps). Rows that need an
    engine with the batch's own version are in (iteration, 2), then in (iteration, 3).

    A group with a suspended row continues with the next batch, in (iteration, 4), as long as it is fresh enough for that batch;
    other groups are drawn to their ends. Another group takes its place in the open batch.
    """

    def __init__(self, flow: Flow, sizes: Sizes, samplers: Mapping[str, Sampler] | None = None) -> None:
        """Begin a run; `samplers` are those of stages that do not take the oldest rows first."""
        super().__init__(flow, tasks_of(flow, sizes.epochs))
        self.sizes, self.samplers = sizes, samplers or {}
        self.tasks.facts = self._facts
        self.sampling = sizes.sampling()
        self.generating = [stage.name for stage in flow.stages if stage.kind is Kind.GENERATE]
        self.selects = [stage.name for stage in flow.stages if stage.kind is Kind.SELECT]
        self.segment = flow.stages[: flow.recorded_stages] if sizes.sets_aside else flow.sampling_segment
        """Stages of groups that may not be in the batch."""
        self.rows_of: dict[int, list[Uid]] = {}
        self.iteration_of: dict[int, int] = {}
        """By group: the batch of its admission, later the batch that contains it."""
        self.versions: dict[Uid, int] = {}
        """The oldest version among a row's tokens, once it is generated."""
        self.tokens: dict[Uid, int] = {}
        """The known length of a row."""
        self.begun: dict[tuple[str, Uid], int] = {}
        """By generate stage and row: the version of the engine that got it."""
        self.suspended_rows: dict[Uid, int] = {}
        """The oldest version among the tokens of suspended rows."""
        self.going_on: set[int] = set()
        """Groups with rows suspended in an earlier batch, or in the open one."""
        self.ending: set[int] = set()
        """Groups among them that must finish because the open batch lacks them."""
        self.opened = 0
        self.horizon = 1
        """Number of batches to admit groups for: the open one, and later ones whose rows engines may start."""
        self.is_open = self.decided = False
        self.released: dict[int, list[Uid]] = {}
        """Rows of the groups released with the last closed batch."""
        self.max_staleness_seen = 0

    def resume(
        self, done: int, sampling: GroupSelector, surplus: Mapping[Uid, int],
        unfinished: Mapping[Uid, UnfinishedRow] | None = None,
    ) -> None:  # fmt: skip
        """Resume after `done` iterations, with the selection's state, the versions of waiting surplus rows, and unfinished rows."""
        self.published = self.opened = done
        self.trained = dict.fromkeys(self.trained, done)
        self.sampling = sampling
        self._be_born(list(surplus), done)
        for stage in self.segment:
            self._leave_out(stage.name, list(surplus))
        for uid, version in surplus.items():
            self.rows_of.setdefault(uid[1], []).append(uid)
            self.iteration_of[uid[1]] = done
            self.versions[uid] = version
        self._resume_rows(unfinished or {})

    def _resume_rows(self, rows: Mapping[Uid, UnfinishedRow]) -> None:
        """Admit rows of a checkpoint that are generated, or suspended, in pending groups."""
        self._be_born(list(rows), self.opened + 1)
        for uid, known in rows.items():
            self.rows_of.setdefault(uid[1], []).append(uid)
            if known.version is not None:
                self.suspended_rows[uid] = known.version
                self.begun.update({(stage, uid): known.version for stage in self.generating})
            if known.has_ended:
                self.versions[uid] = known.version or 0
                for stage in self.generating:
                    self._leave_out(stage, [uid])
        self.going_on = {uid[1] for uid in rows}
        for group in self.going_on:
            self._continue_in(group, self.opened + 1)
        self._decide_generated(self.going_on)

    def put_back(self, versions: Mapping[Uid, int]) -> None:
        """Restore the next batch of a checkpoint, whose rows, of these versions, have passed the recorded stages."""
        self.opened += 1
        batch = self.batches[self.opened] = TrainingBatch.planned(self.flow, self.sizes, self.opened)
        uids = sorted(versions, key=lambda uid: uid[1:])
        self._be_born(uids, self.opened)
        self.versions.update(versions)
        for uid in uids:
            self.rows_of.setdefault(uid[1], []).append(uid)
        groups = dict.fromkeys(uid[1] for uid in uids)
        self._join_groups(batch, [(group, place, place) for place, group in enumerate(groups)])
        batch.is_known = True
        for stage in self.flow.stages[: self.flow.recorded_stages]:
            written = self.tasks.written[stage.name]
            self._leave_out(stage.name, [uid for uid in uids if uid not in written])

    def older_batches(self) -> list[int]:
        """Return the batches from the next to the last open or known one with rows started on an older version."""
        begun = (self._begun_with(group) for group in self.iteration_of)
        older = [
            iteration
            for iteration, version in zip(self.iteration_of.values(), begun, strict=True)
            if iteration <= self.opened and version is not None and version < self.published
        ]
        return list(range(self.published + 1, max(older, default=0) + 1))

    # Admission

    def groups_wanted(self, engine_version: int) -> int:
        """Return the number of groups to admit now, while engines start rows with `engine_version` or later."""
        if not self.is_open:
            opening = self.opened + 1
            if opening > self.sizes.iterations or not admissible(opening, engine_version, self.sizes.ahead):
                return 0
            self._open(opening)
        before = self.horizon
        last = min(engine_version + 1 + self.sizes.ahead, self.sizes.iterations)
        if self.sizes.older_groups is not None:
            last = min(last, self.opened + (engine_version >= trained_on(self.opened)))
        self.horizon = max(1, last - self.opened + 1) if self.segment else 1
        if self.horizon != before:
            self._assign()
        return self.sampling.groups_wanted(self.horizon)

    @property
    def next_group(self) -> int:
        """Return the number of the next group to admit; it falls when groups admitted ahead are returned."""
        return self.sampling.admitted + 1

    def admit(self, uids: Sequence[Uid]) -> None:
        """Admit the rows of a wave; group numbers rise."""
        groups = list(dict.fromkeys(group for _, group, _ in uids))
        for uid in uids:
            self.rows_of.setdefault(uid[1], []).append(uid)
        for iteration, among in self._expected(groups).items():
            self._be_born([uid for group in among for uid in self.rows_of[group]], iteration)
            self.iteration_of.update(dict.fromkeys(among, iteration))
        self._skip(self.segment, uids)
        self.sampling.admit(groups)
        self._assign()
        self.decided = True
        if not self.segment:
            self.sampling.decide({group: Verdict() for group in groups})

    def close(self) -> Selection | None:
        """Add groups guaranteed to be selected to the open batch. When it is complete, close it and release the rest."""
        if not self.is_open or not self.decided:
            return None
        self.decided = False
        batch = self.batches[self.opened]
        self._join(batch)
        if not self.sampling.is_complete():
            self._await_unfinished()
            return None
        outcome = self.sampling.finish(self._usable())
        self.is_open, batch.is_known = False, True
        self.released = {group: self.rows_of[group] for group in (*outcome.released, *outcome.returned)}
        self._forget(self.released)
        batch.uids.sort(key=lambda uid: uid[1:])
        carried = [uid for group in outcome.carried for uid in self.rows_of[group]]
        for consumer in self.tasks.tasks:
            self.tasks.move(consumer, carried, (self.opened + 1, 0))
        self.iteration_of.update(dict.fromkeys(outcome.carried, self.opened + 1))
        self._hold_back(self.opened + 1)
        for group in self.going_on.intersection(self.sampling.pending):
            self._continue_in(group, self.opened + 1)
        self.ending.clear()
        return outcome

    def is_generation_over(self, engine_version: int | None = None) -> bool:
        """Return True if nothing is, or can be, generated with this version: all engines can load weights at once.

        This holds between two batches, and while the open batch waits for rows that only a newer version may start.
        """
        if self.is_open and not self._awaits_newer(engine_version):
            return False
        # Rows carried over to the next batch and not yet started may wait for weights that engines have not loaded.
        tables = [table for name in self.generating for table in self.tasks.tasks[Consumer(name)].undone.items()]
        waits = any(n for table, n in tables if table[0] <= self.opened and self._may_begin(table, engine_version))
        return not waits and not any(lease.task.stage in self.generating for lease in self.tasks.leases.held.values())

    def is_done(self, stage: str) -> bool:
        """Return True if a stage that does not train is done with all rows in work."""
        return not any(self.tasks.tasks[Consumer(stage)].undone.values())

    # Work

    def take(
        self, stage: str, holder: str, now: float, seconds: float, most: int,
        whole_update: bool = False, engine_version: int | None = None, ranks: int = 1,
    ) -> Lease | None:  # fmt: skip
        """Lease ready rows, or return None.

        Args:
            stage: The stage that takes them.
            holder: The worker that takes them.
            now: Time in seconds, on any clock.
            seconds: Duration of the lease without renewal.
            most: Limit of rows.
            whole_update: A train stage gets all rows of its next optimizer step at once, as some losses need.
            engine_version: Version of a possibly stale engine: it gets no rows that would be too stale for training.
            ranks: Processes that share the rows.
        """
        known = self.flow[stage]
        found = self._table_for(known, engine_version)
        if found is None:
            return None
        consumer, table, rows = found
        task = self.tasks.tasks[consumer]
        if whole_update or known.scope is Scope.BATCH:
            whole = list(rows) if rows and task.is_ready(table, len(rows)) else []
            lease = self.tasks.lease(consumer, whole, holder, now, seconds)
        else:
            sampler = self.samplers.get(stage, FIRST_IN)
            lease = self.tasks.take(consumer, holder, now, seconds, most, sampler, ranks, table)
        if lease is not None:
            self._note_begun(known, lease.rows, engine_version)
        return lease

    def take_each(
        self, stage: str, holder: str, now: float, seconds: float, most: int, engine_version: int | None = None
    ) -> list[Lease]:
        """Lease up to `most` ready rows of one table to an engine, each under its own lease, as each ends by itself."""
        known = self.flow[stage]
        found = self._table_for(known, engine_version) if most > 0 else None
        if found is None:
            return []
        consumer, table, _ = found
        leases = self.tasks.take_each(consumer, holder, now, seconds, most, self.samplers.get(stage, FIRST_IN), table)
        self._note_begun(known, [row for lease in leases for row in lease.rows], engine_version)
        return leases

    def _note_begun(self, stage: Stage, rows: Sequence[Uid], engine_version: int | None) -> None:
        """Record the version of the engine that starts rows, or check that rows to train on are fresh enough."""
        if stage.kind is Kind.GENERATE and engine_version is not None:
            oldest = ((row, self.suspended_rows.get(row, engine_version)) for row in rows)
            self.begun.update({(stage.name, row): min(version, engine_version) for row, version in oldest})
        if stage.kind is Kind.TRAIN:
            versions = [self.versions[row] for row in rows]
            stale = check_staleness(self.published + 1, versions, self.sizes.max_staleness, rows)
            self.max_staleness_seen = max(self.max_staleness_seen, stale)

    def acknowledge(self, number: int, now: float, version: int | None = None) -> Lease:
        """Do as `acknowledge_all` with one lease; `version` is the oldest that generated its rows. Raises LeaseLost."""
        rows = self.tasks.leases.current(number, now).rows
        (lease,), _ = self.acknowledge_all([number], now, {} if version is None else dict.fromkeys(rows, version))
        return lease

    def acknowledge_all(
        self, numbers: Sequence[int], now: float, versions: Mapping[Uid, int]
    ) -> tuple[list[Lease], list[int]]:
        """Record that the rows of leases of one stage are done and written.

        Args:
            numbers: Lease numbers.
            now: Time in seconds.
            versions: For a generate stage the oldest version that generated each row.

        Returns:
            The leases, and the numbers of lost ones.
        """
        leases, lost = self.tasks.acknowledge_all(numbers, now)
        if not leases:
            return leases, lost
        stage, rows = self.flow[leases[0].task.stage], [row for lease in leases for row in lease.rows]
        if stage.kind is not Kind.TRAIN:
            self.tasks.write(stage.name, rows)
        if stage.kind is Kind.GENERATE:
            known = self.versions
            known.update({row: min(versions[row], known.get(row, versions[row])) for row in rows if row in versions})
        if stage.kind is Kind.GENERATE and self.sizes.sets_aside:
            self._decide_generated({row[1] for row in rows})
        return leases, lost

    def may_suspend(self, lease: Lease) -> bool:
        """Return True if the rows of a generate stage's lease may continue with the next batch, False if they must finish."""
        return self.sizes.sets_aside and all(self._may_continue(row[1]) for row in lease.rows)

    def suspend(self, number: int, now: float, version: int) -> Lease:
        """Suspend a lease's rows after their token budget, the oldest token with `version`. Raises LeaseLost.

        They resume with the next batch; rows that have become too stale for it resume at once.
        """
        lease = self.tasks.leases.current(number, now)
        self.tasks.give_up([lease])
        self.suspended_rows.update({row: min(version, self.suspended_rows.get(row, version)) for row in lease.rows})
        for group in {row[1] for row in lease.rows}:
            self.going_on.add(group)
            if self._may_continue(group):
                self._continue_in(group, self.opened + 1)
                if self.is_open and group in self.sampling.pending:
                    self.sampling.decide({group: Verdict(UNFINISHED)})
        self.decided = True
        return lease

    def select(
        self,
        number: int,
        now: float,
        reasons: dict[int, str | None],
        scores: Mapping[int, tuple[float, float]] | None = None,
    ) -> Lease:
        """Record a select stage's verdicts (None keeps) on the groups of a lease, and scores of dropped ones. Raises LeaseLost."""
        lease = self.tasks.acknowledge(number, now)
        name = lease.task.stage
        self.tasks.write(name, [row for row in lease.rows if reasons[row[1]] is None])
        for group, reason in reasons.items():
            if reason is not None or name == self.selects[-1]:
                version = min(self.versions[row] for row in self.rows_of[group])
                self.sampling.decide({group: Verdict(reason, version, (scores or {}).get(group))})
        self._assign()
        self.decided = True
        return lease

    def fail_holder(self, holder: str) -> None:
        """Release the leases of a dead worker."""
        self.tasks.give_up(self.tasks.leases.of(holder))

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is complete and its rows are forgotten."""
        batch = super().publish()
        self._forget(dict.fromkeys(uid[1] for uid in batch.uids))
        return batch

    def _table_for(self, stage: Stage, engine_version: int | None) -> Taken | None:
        """Return the task of a stage, the table to take from, and the rows of this update or batch if all are known."""
        if stage.kind is Kind.TRAIN:
            return self.update_to_take(stage)
        if stage.scope is Scope.BATCH or stage.state:
            return self.batch_to_take(stage)
        consumer = Consumer(stage.name)
        ready = self.tasks.tasks[consumer].ready
        # Stages after the selection run only for rows of a batch.
        after = self.segment and stage not in self.segment
        tables = sorted(
            table for table in ready if (not after or table[1] % 2) and self._may_begin(table, engine_version)
        )
        # Inference with changing weights uses the version that the batch trains on, at its position in the list.
        if stage.kind is Kind.INFER and stage.role in self.flow.changed_roles:
            has_weights = self.has_its_weights(stage)
            tables = [table for table in tables if has_weights and table[0] == self.published + 1]
        return (consumer, tables[0], ()) if tables else None

    def _facts(self, uid: Uid) -> Candidate:
        group = uid[1]
        return Candidate(uid, group, len(self.rows_of[group]), self.tokens.get(uid, 0), self.versions.get(uid, 0))

    def _open(self, iteration: int) -> None:
        self.opened, self.is_open, self.decided = iteration, True, True
        self.sampling.begin(trained_on(iteration))
        self._assign()
        self.batches[iteration] = TrainingBatch.planned(self.flow, self.sizes, iteration)

    def _join(self, batch: TrainingBatch) -> None:
        """Add groups guaranteed to be selected to a batch, and to updates that are certain."""
        self._join_groups(batch, self.sampling.members())
        self._hold_back(batch.iteration)

    def _join_groups(self, batch: TrainingBatch, members: Iterable[tuple[int, int, int]]) -> None:
        """Add groups to a batch, and to updates that are the same for every position from the least to the largest."""
        joined, moved = list[Uid](), defaultdict[tuple[Consumer, tuple[int, int]], list[Uid]](list)
        for group, least, largest in members:
            if group not in batch.joined:
                batch.joined[group] = False
                joined += self.rows_of[group]
                self.iteration_of[group] = batch.iteration
            if not batch.joined[group] and (numbers := batch.sure_updates(least, largest)) is not None:
                batch.joined[group] = True
                for consumer, uid, table in batch.enter_updates(self.rows_of[group], numbers):
                    moved[consumer, table].append(uid)
        batch.uids += joined
        for stage in self.flow.stages if joined else ():
            if stage.kind is not Kind.TRAIN:
                self.tasks.move(Consumer(stage.name), joined, (batch.iteration, 1))
        self._skip(self.flow.stages[len(self.segment) :], joined)
        for (consumer, table), uids in moved.items():
            self.tasks.move(consumer, uids, table)

    def _expected(self, groups: Sequence[int]) -> dict[int, Sequence[int]]:
        """Return by iteration the next groups that it should need: their rows must be fresh enough for it."""
        ends = [min(self.sampling.groups_wanted(batches), len(groups)) for batches in range(1, self.horizon)]
        expected, start = {}, 0
        for ahead, end in enumerate([*ends, len(groups)]):
            if end > start:
                expected[self.opened + ahead], start = groups[start:end], end
        return expected

    def _begun_with(self, group: int) -> int | None:
        """Return the oldest version on which a group's rows were started, or None before the start."""
        uids = self.rows_of[group]
        begun = [self.begun[stage, uid] for stage in self.generating for uid in uids if (stage, uid) in self.begun]
        return min((*begun, *(self.versions[uid] for uid in uids if uid in self.versions)), default=None)

    def _is_young(self, group: int) -> bool:
        """Return True if a group's started rows may be in the batch after the open one."""
        version = self._begun_with(group)
        return version is None or admissible(self.opened + 1, version, self.sizes.max_staleness)

    # Suspended rows

    def _may_continue(self, group: int) -> bool:
        """Return True if a group may train with the batch after the open one, and so does not delay the open one."""
        return group not in self.ending and self._is_young(group)

    def _continue_in(self, group: int, iteration: int) -> None:
        """Move a group to an iteration; its unfinished rows continue there."""
        self.iteration_of[group] = iteration
        for consumer in self.tasks.tasks:
            number = SET_ASIDE if consumer.stage in self.generating else 0
            self.tasks.move(consumer, self.rows_of[group], (iteration, number))

    def _await_unfinished(self) -> None:
        """Finish the rows that the open batch lacks if no more groups may start."""
        for group in self.sampling.finish_now():
            self.ending.add(group)
            self._continue_in(group, self.opened)

    def _decide_generated(self, groups: Iterable[int]) -> None:
        """Keep the groups whose rows are all generated, in a flow without selection."""
        written = [self.tasks.written[stage] for stage in self.generating]
        for group in [] if self.selects else groups:
            rows = self.rows_of[group]
            if group in self.sampling.pending and all(row in known for known in written for row in rows):
                self.sampling.decide({group: Verdict(version=min(self.versions[row] for row in rows))})
                self.decided = True

    # A share of rows of the batch's own version

    def _may_begin(self, table: tuple[int, int], engine_version: int | None) -> bool:
        """Return True if an engine's version is fresh enough for the rows of a table; None stands for a worker that is no engine."""
        if table[1] == SET_ASIDE:
            is_open = table[0] <= self.opened
            return is_open and (
                engine_version is None or admissible(table[0], engine_version, self.sizes.max_staleness)
            )
        bound = 0 if table[1] >= OWN_VERSION else self.sizes.ahead
        if self.sizes.older_groups is not None and self.selects and table[0] > self.opened:
            # A group admitted ahead may come into the open batch, and must not be staler than it.
            bound = min(bound, 1)
        return engine_version is None or admissible(table[0], engine_version, bound)

    def _assign(self) -> None:
        """Assign undecided groups to the open batch as far as needed, and the others to later ones; hold back groups without a place."""
        if self.sizes.older_groups is None or not self.is_open:
            return
        needed = self.sampling.under_way() if self.horizon > 1 else len(self.sampling.pending)
        for place, group in enumerate(sorted(self.sampling.pending)):
            self.iteration_of[group] = self.opened + (place >= needed)
        self._hold_back(self.opened)
        self._hold_back(self.opened + 1)

    def _hold_back(self, iteration: int) -> None:
        """Let groups of a batch wait for its own version, except those that may be stale."""
        if self.sizes.older_groups is None:
            return
        batch = self.batches.get(iteration)
        begun = self._begun(group for group, expected in self.iteration_of.items() if expected >= iteration)
        groups = {group for group in begun if self.iteration_of[group] == iteration}
        waiting = waiting_groups(begun, groups, trained_on(iteration), self.sizes.older_groups)
        for group in groups:
            table = iteration, (batch is not None and group in batch.joined) + OWN_VERSION * (group in waiting)
            for stage in self.generating:
                self.tasks.move(Consumer(stage), self.rows_of[group], table)

    def _begun(self, groups: Iterable[int]) -> dict[int, int | None]:
        """Return, for each of these groups that is not dropped, the oldest version on which its rows were started."""
        verdicts = self.sampling.verdicts
        kept = (group for group in groups if group not in verdicts or verdicts[group].reason is None)
        return {group: self._begun_with(group) for group in kept}

    def _usable(self) -> Callable[[int], bool]:
        """Return True if a group admitted ahead may be in the batch after the open one."""
        places = self.sizes.older_groups
        too_many = set[int]() if places is None else begun_too_many(self._begun(self.rows_of), places)
        return lambda group: group not in too_many and self._is_young(group)

    def _awaits_newer(self, engine_version: int | None) -> bool:
        """Return True if all groups that the open batch lacks wait for a newer version."""
        lacking = [group for group in self.sampling.pending if self.iteration_of[group] == self.opened]
        table = self.tasks.tasks[Consumer(self.generating[0])].table if self.generating else {}
        tables = [table[uid] for group in lacking for uid in self.rows_of[group]]
        return bool(tables) and not any(self._may_begin(table, engine_version) for table in tables)

    def _be_born(self, uids: Sequence[Uid], iteration: int) -> None:
        self.tasks.admit(uids, lambda uid: uid[1], (iteration, 0))
        self.tasks.write(ADMISSION, uids)

    def _skip(self, stages: Iterable[Stage], uids: Sequence[Uid]) -> None:
        """Skip these rows in stages that `when` leaves out of the open iteration."""
        for stage in stages:
            if stage.kind is not Kind.TRAIN and not stage.when.includes(self.opened):
                self._leave_out(stage.name, uids)

    def _leave_out(self, stage: str, uids: Sequence[Uid]) -> None:
        """Skip rows in a stage: no task waits for it, and it takes none of them."""
        self.tasks.write(stage, uids)
        self.tasks.skip(Consumer(stage), uids)

    def _forget(self, groups: Iterable[int]) -> None:
        groups = list(groups)
        uids = [uid for group in groups for uid in self.rows_of.pop(group)]
        self.tasks.forget(uids)
        for known in (self.versions, self.tokens, self.suspended_rows):
            for uid in uids if known else ():
                known.pop(uid, None)
        for stage in self.generating:
            for uid in uids:
                self.begun.pop((stage, uid), None)
        for group in groups:
            self.iteration_of.pop(group, None)
            self.going_on.discard(group)
            self.ending.discard(group)


def tasks_of(flow: Flow, epochs: int) -> Tasks:
    """Return a task for each stage of a flow, and for each epoch of a train stage, that waits for the stages before it."""
    waits, consumers = waits_for(flow), {}
    for stage in flow.stages:
        for epoch in range(epochs if is_optimized(stage) else 1):
            consumers[Consumer(stage.name, epoch)] = stage
    groups = [consumer for consumer, stage in consumers.items() if stage.scope is Scope.GROUP]
    return Tasks({consumer: waits[consumer.stage] for consumer in consumers}, groups)

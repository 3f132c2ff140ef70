"""The streaming runtime's decisions as one state machine: who may admit, take, step and publish now. No clock, no socket, no payload.

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
"""The number of a table whose rows go on once the batch of their iteration is open."""


class UnfinishedRow(NamedTuple):
    """What a checkpoint knows of a row in work: the oldest version among its tokens, None without any, and whether it has ended."""

    version: int | None
    has_ended: bool


class StreamSchedule(TrainingSchedule):
    """What is decided in streaming, over all rows in work.

    A stage, or an epoch of one that trains, is a task. Its rows lie in the table (iteration, 0) while their batch is open, then in
    (iteration, 1); those of a train stage in one table for each optimizer step, (iteration, 1 + steps that are left). Rows that only an
    engine with the batch's own version may begin lie in (iteration, 2), then in (iteration, 3).

    Where rows are set aside, a group with one that has drawn what a batch gives it goes on with the next batch, in (iteration, 4), as
    long as it is young enough for that one; others are drawn to their ends. Its place in the open batch is another group's.
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
        """The stages that run for groups of which it is not known whether they are in the batch."""
        self.rows_of: dict[int, list[Uid]] = {}
        self.iteration_of: dict[int, int] = {}
        """Of each group: the batch that it was admitted for, then the one that it is in."""
        self.versions: dict[Uid, int] = {}
        """The oldest version among a row's tokens, once it is generated."""
        self.tokens: dict[Uid, int] = {}
        """Length of what is known of a row."""
        self.begun: dict[tuple[str, Uid], int] = {}
        """For each generate stage and row what the engine held that it was given to."""
        self.set_aside_rows: dict[Uid, int] = {}
        """The oldest version among the tokens of rows that were set aside."""
        self.going_on: set[int] = set()
        """Groups with rows that were set aside in an earlier batch, or in the open one."""
        self.ending: set[int] = set()
        """Those of them whose rows are drawn to their ends since the open batch lacks them."""
        self.opened = 0
        self.horizon = 1
        """How many batches groups are admitted for: the open one, and those after it for which engines may begin rows."""
        self.is_open = self.decided = False
        self.released: dict[int, list[Uid]] = {}
        """Rows of the groups that were let go with the batch that was closed last."""
        self.max_staleness_seen = 0

    def resume(
        self, done: int, sampling: GroupSelector, surplus: Mapping[Uid, int],
        unfinished: Mapping[Uid, UnfinishedRow] | None = None,
    ) -> None:  # fmt: skip
        """Go on after `done` iterations, with the selection's state, the versions of surplus rows that wait, and rows that go on."""
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
        self._go_on_with(unfinished or {})

    def _go_on_with(self, rows: Mapping[Uid, UnfinishedRow]) -> None:
        """Let rows of a checkpoint be born that are generated, or were set aside, in groups that are awaited."""
        self._be_born(list(rows), self.opened + 1)
        for uid, known in rows.items():
            self.rows_of.setdefault(uid[1], []).append(uid)
            if known.version is not None:
                self.set_aside_rows[uid] = known.version
                self.begun.update({(stage, uid): known.version for stage in self.generating})
            if known.has_ended:
                self.versions[uid] = known.version or 0
                for stage in self.generating:
                    self._leave_out(stage, [uid])
        self.going_on = {uid[1] for uid in rows}
        for group in self.going_on:
            self._goes_on_in(group, self.opened + 1)
        self._decide_generated(self.going_on)

    def put_back(self, versions: Mapping[Uid, int]) -> None:
        """Let the next batch of a checkpoint be known, whose rows, of these versions, have come through the recorded stages."""
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
        """Return the batches from the next one to the last that is open or known and has rows which older weights have begun."""
        begun = (self._begun_with(group) for group in self.iteration_of)
        older = [
            iteration
            for iteration, version in zip(self.iteration_of.values(), begun, strict=True)
            if iteration <= self.opened and version is not None and version < self.published
        ]
        return list(range(self.published + 1, max(older, default=0) + 1))

    # Admission

    def groups_wanted(self, engine_version: int) -> int:
        """Return how many groups to admit now, while engines begin rows with `engine_version` or later."""
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
        """Return the number of the group to admit next; it falls when groups that were admitted ahead have been returned."""
        return self.sampling.admitted + 1

    def admit(self, uids: Sequence[Uid]) -> None:
        """Let the rows of a wave be born; group numbers rise."""
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
        """Let groups join the open batch that are sure to be in it; if it is complete end its selection, and forget what was let go."""
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
            self._goes_on_in(group, self.opened + 1)
        self.ending.clear()
        return outcome

    def is_generation_over(self, engine_version: int | None = None) -> bool:
        """Return whether nothing is being generated or could be with this version: then all engines can load weights at once.

        So it is between two batches, and while the open one waits for rows that only a newer version may begin.
        """
        if self.is_open and not self._awaits_newer(engine_version):
            return False
        # Rows that were carried over to the next batch and are not begun may wait for weights that engines are yet to load.
        tables = [table for name in self.generating for table in self.tasks.tasks[Consumer(name)].undone.items()]
        waits = any(n for table, n in tables if table[0] <= self.opened and self._may_begin(table, engine_version))
        return not waits and not any(lease.task.stage in self.generating for lease in self.tasks.leases.held.values())

    def is_done(self, stage: str) -> bool:
        """Return whether a stage that does not train is done with all rows in work."""
        return not any(self.tasks.tasks[Consumer(stage)].undone.values())

    # Work

    def take(
        self, stage: str, holder: str, now: float, seconds: float, most: int,
        whole_update: bool = False, engine_version: int | None = None, ranks: int = 1,
    ) -> Lease | None:  # fmt: skip
        """Lease rows that are ready, or return None.

        Args:
            stage: what they are ready for.
            holder: who takes them.
            now: the time in seconds, on whatever clock.
            seconds: how long the holder keeps them without renewing.
            most: rows at most.
            whole_update: a train stage gets all rows of its next optimizer step at once, as some losses need them.
            engine_version: of an engine whose weights may lag behind: it gets no rows that would be too old when they are trained.
            ranks: the processes that share the rows.
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
        """Lease up to `most` ready rows of one table to an engine, each under a lease of its own, as each ends by itself."""
        known = self.flow[stage]
        found = self._table_for(known, engine_version) if most > 0 else None
        if found is None:
            return []
        consumer, table, _ = found
        leases = self.tasks.take_each(consumer, holder, now, seconds, most, self.samplers.get(stage, FIRST_IN), table)
        self._note_begun(known, [row for lease in leases for row in lease.rows], engine_version)
        return leases

    def _note_begun(self, stage: Stage, rows: Sequence[Uid], engine_version: int | None) -> None:
        """Note what the engine holds that begins rows, or check that rows to train on are young enough."""
        if stage.kind is Kind.GENERATE and engine_version is not None:
            oldest = ((row, self.set_aside_rows.get(row, engine_version)) for row in rows)
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
        """Note that the rows of leases of one stage are done and written.

        Args:
            numbers: the leases'.
            now: the time in seconds.
            versions: the oldest version that generated each row, of a generate stage.

        Returns:
            The leases, and the numbers of those that were lost.
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

    def may_set_aside(self, lease: Lease) -> bool:
        """Return whether the rows of a generate stage's lease may go on with the next batch, or are to be drawn to their ends."""
        return self.sizes.sets_aside and all(self._may_go_on(row[1]) for row in lease.rows)

    def set_aside(self, number: int, now: float, version: int) -> Lease:
        """Note that a lease's rows have drawn what a batch gives them, the oldest token with `version`. Raises LeaseLost.

        They go on with the next batch; those that have become too old for it meanwhile go on at once.
        """
        lease = self.tasks.leases.current(number, now)
        self.tasks.give_up([lease])
        self.set_aside_rows.update({row: min(version, self.set_aside_rows.get(row, version)) for row in lease.rows})
        for group in {row[1] for row in lease.rows}:
            self.going_on.add(group)
            if self._may_go_on(group):
                self._goes_on_in(group, self.opened + 1)
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
        """Note a select stage's verdicts (None keeps) on the groups of a lease, and scores of dropped ones. Raises LeaseLost."""
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
        """Free what a worker that is gone has held."""
        self.tasks.give_up(self.tasks.leases.of(holder))

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is over and its rows are forgotten."""
        batch = super().publish()
        self._forget(dict.fromkeys(uid[1] for uid in batch.uids))
        return batch

    def _table_for(self, stage: Stage, engine_version: int | None) -> Taken | None:
        """Return the task of a stage, the table to take from, and the rows of the update or batch that this is if all are known."""
        if stage.kind is Kind.TRAIN:
            return self.update_to_take(stage)
        if stage.scope is Scope.BATCH or stage.state:
            return self.batch_to_take(stage)
        consumer = Consumer(stage.name)
        ready = self.tasks.tasks[consumer].ready
        # What comes after the selection is done for rows of a batch alone.
        after = self.segment and stage not in self.segment
        tables = sorted(
            table for table in ready if (not after or table[1] % 2) and self._may_begin(table, engine_version)
        )
        # Inference with weights that change belongs to the version that the batch is trained on, and to its place in the list.
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
        """Add groups to a batch that are sure to be in it, and to updates that are sure to be theirs."""
        self._join_groups(batch, self.sampling.members())
        self._hold_back(batch.iteration)

    def _join_groups(self, batch: TrainingBatch, members: Iterable[tuple[int, int, int]]) -> None:
        """Add groups to a batch, and to updates where they are the same for every place from the least to the largest."""
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
        """Return for each iteration those of the next groups that it should need: their rows must be young enough for it."""
        ends = [min(self.sampling.groups_wanted(batches), len(groups)) for batches in range(1, self.horizon)]
        expected, start = {}, 0
        for ahead, end in enumerate([*ends, len(groups)]):
            if end > start:
                expected[self.opened + ahead], start = groups[start:end], end
        return expected

    def _begun_with(self, group: int) -> int | None:
        """Return the oldest version that a group's rows were begun with, or None while none is."""
        uids = self.rows_of[group]
        begun = [self.begun[stage, uid] for stage in self.generating for uid in uids if (stage, uid) in self.begun]
        return min((*begun, *(self.versions[uid] for uid in uids if uid in self.versions)), default=None)

    def _is_young(self, group: int) -> bool:
        """Return whether a group's rows, as far as they were begun, may be in the batch after the open one."""
        version = self._begun_with(group)
        return version is None or admissible(self.opened + 1, version, self.sizes.max_staleness)

    # Rows that are set aside

    def _may_go_on(self, group: int) -> bool:
        """Return whether a group may be trained with the batch after the open one, which it does not hold up."""
        return group not in self.ending and self._is_young(group)

    def _goes_on_in(self, group: int, iteration: int) -> None:
        """Let a group be of an iteration, with which those of its rows go on that have not ended."""
        self.iteration_of[group] = iteration
        for consumer in self.tasks.tasks:
            number = SET_ASIDE if consumer.stage in self.generating else 0
            self.tasks.move(consumer, self.rows_of[group], (iteration, number))

    def _await_unfinished(self) -> None:
        """Have the rows drawn to their ends that the open batch lacks where no more may be begun."""
        for group in self.sampling.finish_now():
            self.ending.add(group)
            self._goes_on_in(group, self.opened)

    def _decide_generated(self, groups: Iterable[int]) -> None:
        """Keep the groups all of whose rows are generated, in a flow that selects nothing."""
        written = [self.tasks.written[stage] for stage in self.generating]
        for group in [] if self.selects else groups:
            rows = self.rows_of[group]
            if group in self.sampling.pending and all(row in known for known in written for row in rows):
                self.sampling.decide({group: Verdict(version=min(self.versions[row] for row in rows))})
                self.decided = True

    # A share of rows of the batch's own version

    def _may_begin(self, table: tuple[int, int], engine_version: int | None) -> bool:
        """Return whether an engine's version is young enough for the rows of a table; None is whoever is no engine."""
        if table[1] == SET_ASIDE:
            is_open = table[0] <= self.opened
            return is_open and (
                engine_version is None or admissible(table[0], engine_version, self.sizes.max_staleness)
            )
        bound = 0 if table[1] >= OWN_VERSION else self.sizes.ahead
        if self.sizes.older_groups is not None and self.selects and table[0] > self.opened:
            # A group that went ahead may come into the open batch, and is not to be older than it.
            bound = min(bound, 1)
        return engine_version is None or admissible(table[0], engine_version, bound)

    def _assign(self) -> None:
        """Let as many undecided groups be of the open batch as it should need, and the others be ahead; hold back what has no place."""
        if self.sizes.older_groups is None or not self.is_open:
            return
        needed = self.sampling.under_way() if self.horizon > 1 else len(self.sampling.pending)
        for place, group in enumerate(sorted(self.sampling.pending)):
            self.iteration_of[group] = self.opened + (place >= needed)
        self._hold_back(self.opened)
        self._hold_back(self.opened + 1)

    def _hold_back(self, iteration: int) -> None:
        """Let groups of a batch wait for its own version, but for those that may be older."""
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
        """Return for each of these groups that is not dropped what its rows were begun with."""
        verdicts = self.sampling.verdicts
        kept = (group for group in groups if group not in verdicts or verdicts[group].reason is None)
        return {group: self._begun_with(group) for group in kept}

    def _usable(self) -> Callable[[int], bool]:
        """Return whether a group that was admitted ahead may be in the batch after the open one."""
        places = self.sizes.older_groups
        too_many = set[int]() if places is None else begun_too_many(self._begun(self.rows_of), places)
        return lambda group: group not in too_many and self._is_young(group)

    def _awaits_newer(self, engine_version: int | None) -> bool:
        """Return whether all groups that the open batch lacks wait for a newer version."""
        lacking = [group for group in self.sampling.pending if self.iteration_of[group] == self.opened]
        table = self.tasks.tasks[Consumer(self.generating[0])].table if self.generating else {}
        tables = [table[uid] for group in lacking for uid in self.rows_of[group]]
        return bool(tables) and not any(self._may_begin(table, engine_version) for table in tables)

    def _be_born(self, uids: Sequence[Uid], iteration: int) -> None:
        self.tasks.admit(uids, lambda uid: uid[1], (iteration, 0))
        self.tasks.write(ADMISSION, uids)

    def _skip(self, stages: Iterable[Stage], uids: Sequence[Uid]) -> None:
        """Let stages that `when` leaves out of the open iteration leave out these rows."""
        for stage in stages:
            if stage.kind is not Kind.TRAIN and not stage.when.includes(self.opened):
                self._leave_out(stage.name, uids)

    def _leave_out(self, stage: str, uids: Sequence[Uid]) -> None:
        """Leave rows out of a stage: nobody waits for it with them, and it takes none of them."""
        self.tasks.write(stage, uids)
        self.tasks.skip(Consumer(stage), uids)

    def _forget(self, groups: Iterable[int]) -> None:
        groups = list(groups)
        uids = [uid for group in groups for uid in self.rows_of.pop(group)]
        self.tasks.forget(uids)
        for known in (self.versions, self.tokens, self.set_aside_rows):
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
    """Return a task for each stage of a flow, and for each epoch where it trains, that waits for the stages before it."""
    waits, consumers = waits_for(flow), {}
    for stage in flow.stages:
        for epoch in range(epochs if is_optimized(stage) else 1):
            consumers[Consumer(stage.name, epoch)] = stage
    groups = [consumer for consumer, stage in consumers.items() if stage.scope is Scope.GROUP]
    return Tasks({consumer: waits[consumer.stage] for consumer in consumers}, groups)

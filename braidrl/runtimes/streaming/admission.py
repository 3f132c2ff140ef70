"""Admission of groups to batches: how many may start now, on which weights, and which batch each one joins.

    groups_wanted ─▶ admit ─▶ [undecided groups, each in the bucket of its batch] ─verdicts─▶ decide ─▶ close
          ▲                                                                               the batch is known │
          └──────────────────── published, and loaded by engines ◀───────────────────────────────────────────┘

A group with a suspended row continues with the next batch as long as it is fresh enough for that batch; other groups
are generated to completion. A suspended group's slot in the open batch goes to another group.
"""

from collections.abc import Iterable, Mapping, Sequence

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes, TrainingBatch, admissible, trained_on
from braidrl.flow.columns import ADMISSION
from braidrl.flow.selecting import UNFINISHED, GroupSelector, Selection, Verdict, started_too_many
from braidrl.flow.stage import Kind
from braidrl.queue.table import Lease
from braidrl.queue.tasks import Tasks
from braidrl.runtimes.streaming.consumers import Bucket, Consumer, Consumers, RowState, TrainingProgress


class RowVersions:
    """The policy versions of the rows in work."""

    def __init__(self) -> None:
        self.oldest: dict[Uid, int] = {}
        """The oldest version among a row's tokens, once it is generated."""
        self.started: dict[Uid, int] = {}
        """The oldest version of an engine that got a row."""
        self.suspended: dict[Uid, int] = {}
        """The oldest version among the tokens of suspended rows."""

    def start(self, rows: Iterable[Uid], version: int) -> None:
        """Record that an engine with this version got rows."""
        for row in rows:
            self.started[row] = min(version, self.suspended.get(row, version), self.started.get(row, version))

    def suspend(self, rows: Mapping[Uid, int]) -> None:
        """Record suspended rows with the oldest version among their tokens."""
        for row, version in rows.items():
            self.suspended[row] = min(version, self.suspended.get(row, version))

    def at_start(self, rows: Iterable[Uid]) -> int | None:
        """Return the oldest version on which one of these rows was started; None if none was started."""
        return min((known[row] for row in rows for known in (self.started, self.oldest) if row in known), default=None)

    def forget(self, rows: Iterable[Uid]) -> None:
        """Forget rows."""
        for known in filter(None, (self.oldest, self.started, self.suspended)):
            for row in rows:
                known.pop(row, None)


class GroupAdmission:
    """The undecided groups of the open batch and of later ones, and the rows of all groups in work."""

    def __init__(
        self, sizes: Sizes, consumers: Consumers, tasks: Tasks, progress: TrainingProgress, versions: RowVersions
    ) -> None:
        """Begin a run without groups; batches that open are added to `progress`."""
        self.sizes, self.consumers, self.tasks, self.progress = sizes, consumers, tasks, progress
        self.versions = versions
        self.sampling = GroupSelector(
            sizes.prompts_per_step, sizes.epoch_groups, sizes.surplus, sizes.max_staleness, sizes.over_sampling
        )
        flow = consumers.flow
        segment = flow.stages[: flow.recorded_stages] if sizes.partial_rollout else flow.sampling_segment
        self.segment = [c for c in consumers if c.stages[0] in segment and c.kind is not Kind.TRAIN]
        """Consumers of groups that may not be in the batch."""
        self.after = [c for c in consumers if c not in self.segment and c.takes_rows]
        """Consumers of rows of a batch."""
        self.early = [*consumers.verdicts, *(c.name for c in self.segment)]
        """Tasks that rows enter with their admission; they enter the others with their batch."""
        self.rows_of: dict[int, list[Uid]] = {}
        self.iteration_of: dict[int, int] = {}
        """The batch of a group's admission, later the batch that contains it."""
        self.tokens: dict[Uid, int] = {}
        """The known length of a row."""
        self.resumed_groups: set[int] = set()
        """Groups with rows suspended in an earlier batch, or in the open one."""
        self.ending: set[int] = set()
        """Groups among them that must finish because the open batch lacks them."""
        self.opened = 0
        self.lookahead = 1
        """Number of batches to admit groups for: the open one, and later ones whose rows engines may start."""
        self.is_open = self.decided = False
        self.released: dict[int, list[Uid]] = {}
        """Rows of the groups released with the last closed batch."""
        self.dropped: dict[Lease, list[Uid]] = {}
        """The rows of a lease in these groups."""

    def resume(
        self,
        done: int,
        sampling: GroupSelector,
        surplus: Mapping[Uid, int],
        unfinished: Mapping[Uid, int | None] | None = None,
    ) -> None:
        """Resume after `done` iterations.

        `surplus` are the rows that wait for the next batch, with the oldest version among their tokens. `unfinished`
        are the rows of pending groups, generated or suspended, likewise; None marks rows without tokens.
        """
        self.progress.published = self.opened = done
        self.sampling = sampling
        self._admit(list(surplus), done)
        for name in self.early:
            self._leave_out(name, list(surplus))
        self.iteration_of.update(dict.fromkeys((uid[1] for uid in surplus), done))
        self.versions.oldest.update(surplus)
        # An engine returns completed rows unchanged.
        rows = unfinished or {}
        self._admit(list(rows), self.opened + 1)
        drawn = {uid: version for uid, version in rows.items() if version is not None}
        self.versions.suspended.update(drawn)
        self.versions.started.update(drawn)
        self.resumed_groups = {uid[1] for uid in rows}
        for group in self.resumed_groups:
            self._continue_in(group, self.opened + 1)

    def restore_batch(self, versions: Mapping[Uid, int]) -> None:
        """Restore a checkpoint's next batch, whose rows have passed the recorded stages, with each row's version."""
        self.opened += 1
        batch = self.progress.batches[self.opened] = TrainingBatch.planned(self.sizes, self.opened)
        uids = sorted(versions, key=lambda uid: uid[1:])
        self._admit(uids, self.opened)
        self.versions.oldest.update(versions)
        groups = dict.fromkeys(uid[1] for uid in uids)
        self._join_groups(batch, [(group, rank, rank) for rank, group in enumerate(groups)])
        for name in [*self.consumers.recorded, *self.consumers.verdicts]:
            self._leave_out(name, uids)
        batch.is_known = True

    def older_batches(self) -> list[int]:
        """Return the batches from the next to the last open or known one with rows started on an older version."""
        started = (self.versions.at_start(self.rows_of[group]) for group in self.iteration_of)
        older = [
            iteration
            for iteration, version in zip(self.iteration_of.values(), started, strict=True)
            if iteration <= self.opened and version is not None and version < self.progress.published
        ]
        return list(range(self.progress.published + 1, max(older, default=0) + 1))

    def may_open(self, engine_version: int | None, early: bool = True) -> bool:
        """Return True if the next batch may be opened while engines hold a version; None means no version.

        With `early`, an on-policy batch opens one version before its rows may start, so that they are already in the
        queue. Under staleness the lookahead has this effect.
        """
        if engine_version is None or self.opened >= self.sizes.iterations:
            return False
        return admissible(self.opened + 1, engine_version + (early and not self.sizes.max_staleness), self.sizes.ahead)

    def groups_wanted(self, engine_version: int) -> int:
        """Return the number of groups to admit now, while engines start rows with `engine_version` or later."""
        if not self.is_open:
            if not self.may_open(engine_version):
                return 0
            self.opened, self.is_open, self.decided = self.opened + 1, True, True
            self.sampling.begin(trained_on(self.opened))
            self._assign()
            self.progress.batches[self.opened] = TrainingBatch.planned(self.sizes, self.opened)
        before = self.lookahead
        last = min(engine_version + 1 + self.sizes.ahead, self.sizes.iterations)
        if self.sizes.older_groups is not None:
            last = min(last, self.opened + (engine_version >= trained_on(self.opened)))
        self.lookahead = max(1, last - self.opened + 1) if self.segment else 1
        if self.lookahead != before:
            self._assign()
        return self.sampling.groups_wanted(self.lookahead)

    def admit(self, uids: Sequence[Uid]) -> None:
        """Admit the rows of a wave; group numbers rise."""
        groups = dict[int, list[Uid]]()
        for uid in uids:
            groups.setdefault(uid[1], []).append(uid)
        # A group is expected in the first iteration that needs it: its rows must be fresh enough for that.
        numbers, start = list(groups), 0
        ends = [min(self.sampling.groups_wanted(batches), len(numbers)) for batches in range(1, self.lookahead)]
        for iteration, end in enumerate([*ends, len(numbers)], self.opened):
            if end > start:
                expected, start = numbers[start:end], end
                self._admit([uid for group in expected for uid in groups[group]], iteration)
                self.iteration_of.update(dict.fromkeys(expected, iteration))
        self._skip(self.segment, uids)
        for name in self.consumers.verdicts:
            if not self.consumers.flow[name].when.includes(self.opened):
                self._leave_out(name, uids)
        self.sampling.admit(list(groups))
        self._assign()
        self.decided = True
        if not self.segment:
            self.sampling.decide({group: Verdict() for group in groups})

    def close(self) -> Selection | None:
        """Add groups guaranteed to be selected to the open batch.

        When it is complete, close it and release the rest.
        """
        if not self.is_open or not self.decided:
            return None
        self.decided = False
        batch = self.progress.batches[self.opened]
        self._join_groups(batch, self.sampling.members())
        self._hold_back(batch.iteration)
        if not self.sampling.is_complete():
            # If no more groups may start, the rows that the open batch lacks are generated to completion.
            for group in self.sampling.finish_now():
                self.ending.add(group)
                self._continue_in(group, self.opened)
            return None
        older = self.sizes.older_groups
        too_many = set[int]() if older is None else started_too_many(self._started(self.rows_of), older)
        outcome = self.sampling.finish(lambda group: group not in too_many and self._is_young(group))
        self.is_open, batch.is_known = False, True
        self.released = {group: self.rows_of[group] for group in (*outcome.released, *outcome.returned)}
        self.dropped = self.forget(self.released)
        batch.uids.sort(key=lambda uid: uid[1:])
        carried = [uid for group in outcome.carried for uid in self.rows_of[group]]
        for name in self.early if carried else ():
            self.tasks[name].move(carried, Bucket(self.opened + 1, RowState.OPEN))
        self.iteration_of.update(dict.fromkeys(outcome.carried, self.opened + 1))
        self._hold_back(self.opened + 1)
        for group in self.resumed_groups.intersection(self.sampling.pending):
            self._continue_in(group, self.opened + 1)
        self.ending.clear()
        return outcome

    def decide(self, verdicts: Mapping[int, Verdict]) -> None:
        """Record the verdicts on groups; the next `close` considers them."""
        self.sampling.decide(verdicts)
        self._assign()
        self.decided = True

    def keep_generated(self, rows: Iterable[Uid]) -> None:
        """Without selection, keep the groups of these rows that are generated to completion."""
        written = [self.tasks.written[stage] for stage in self.consumers.generating]
        for group in {row[1] for row in rows}.intersection(self.sampling.pending):
            uids = self.rows_of[group]
            if all(uids_written.issuperset(uids) for uids_written in written):
                self.decide({group: self.verdict(group)})

    def verdict(self, group: int, reason: str | None = None, scores: tuple[float, float] | None = None) -> Verdict:
        """Return the verdict on a generated group, which is kept without a reason to drop it."""
        return Verdict(reason, min(self.versions.oldest[uid] for uid in self.rows_of[group]), scores)

    def may_suspend(self, row: Uid) -> bool:
        """Return True if a row may train with the batch after the open one, and thus does not delay the open one."""
        return self.sizes.partial_rollout and row[1] not in self.ending and self._is_young(row[1])

    def suspend(self, rows: Iterable[Uid]) -> None:
        """Let groups with suspended rows continue with the next batch, unless they are too stale for it."""
        for group, row in {row[1]: row for row in rows}.items():
            self.resumed_groups.add(group)
            if self.may_suspend(row):
                self._continue_in(group, self.opened + 1)
                if self.is_open and group in self.sampling.pending:
                    self.sampling.decide({group: Verdict(UNFINISHED)})
        self.decided = True

    def may_start(self, bucket: Bucket, engine_version: int | None) -> bool:
        """Return True if an engine's version is fresh enough for the rows of a bucket; None is a worker without one."""
        iteration = bucket.iteration
        if bucket.state is RowState.RESUMED:
            return iteration <= self.opened and (
                engine_version is None or admissible(iteration, engine_version, self.sizes.max_staleness)
            )
        bound = 0 if bucket.needs_own_version else self.sizes.ahead
        if self.sizes.older_groups is not None and self.consumers.selects and iteration > self.opened:
            # A group admitted ahead may come into the open batch, and must not be staler than it.
            bound = min(bound, 1)
        return engine_version is None or admissible(iteration, engine_version, bound)

    def is_generation_over(self, engine_version: int | None = None) -> bool:
        """Return True if nothing is, or can be, generated with this version, so that all engines can load weights.

        This holds between two batches, and while the open batch waits for rows that only a newer version may start. It
        does not hold while the next batch may start on this version and is not open yet: otherwise its version would
        depend on when it opens.
        """
        if self.is_open:
            lacking = [group for group in self.sampling.pending if self.iteration_of[group] == self.opened]
            bucket_of = self.tasks[self.consumers.generating[0]].table if self.consumers.generating else {}
            lacked = [bucket_of[uid] for group in lacking for uid in self.rows_of[group]]
            if not lacked or any(self.may_start(bucket, engine_version) for bucket in lacked):
                return False
        elif self.may_open(engine_version, early=False):
            return False
        # Rows carried over to the next batch and not yet started may wait for weights that engines have not loaded.
        undone = [pair for name in self.consumers.generating for pair in self.tasks[name].undone.items()]
        waits = any(n for key, n in undone if key.iteration <= self.opened and self.may_start(key, engine_version))
        return not waits and not any(
            lease.task in self.consumers.generating for lease in self.tasks.leases.held.values()
        )

    def _join_groups(self, batch: TrainingBatch, members: Iterable[tuple[int, int, int]]) -> None:
        """Add groups to a batch.

        Trainers get a group once its updates no longer depend on its final position.
        """
        joined, sure = list[Uid](), list[Uid]()
        for group, least, largest in members:
            if group not in batch.joined:
                batch.joined[group] = None
                joined += self.rows_of[group]
                self.iteration_of[group] = batch.iteration
            if batch.joined[group] is None:
                size = batch.samples
                plans = [batch.plan[rank * size : (rank + 1) * size] for rank in range(least, largest + 1)]
                if all(plan == plans[0] for plan in plans):
                    batch.joined[group] = plans[0]
                    sure += self.rows_of[group]
        batch.uids += joined
        bucket = Bucket(batch.iteration, RowState.IN_BATCH)
        for name in self.early if joined else ():
            self.tasks[name].move(joined, bucket)
        for consumer in self.after:
            if rows := sure if consumer.kind is Kind.TRAIN else joined:
                self.tasks[consumer.name].admit(rows, bucket)
                self._skip([consumer], rows)

    def _is_young(self, group: int) -> bool:
        """Return True if a group's started rows may be in the batch after the open one."""
        version = self.versions.at_start(self.rows_of[group])
        return version is None or admissible(self.opened + 1, version, self.sizes.max_staleness)

    def _continue_in(self, group: int, iteration: int) -> None:
        """Move a group to an iteration; its unfinished rows continue there."""
        self.iteration_of[group] = iteration
        for name in self.early:
            state = RowState.RESUMED if name in self.consumers.generating else RowState.OPEN
            self.tasks[name].move(self.rows_of[group], Bucket(iteration, state))

    def _assign(self) -> None:
        """Assign undecided groups to the open batch as needed, others to later ones; hold back those without a slot."""
        if self.sizes.older_groups is None or not self.is_open:
            return
        needed = self.sampling.under_way() if self.lookahead > 1 else len(self.sampling.pending)
        for rank, group in enumerate(sorted(self.sampling.pending)):
            self.iteration_of[group] = self.opened + (rank >= needed)
        self._hold_back(self.opened)
        self._hold_back(self.opened + 1)

    def _hold_back(self, iteration: int) -> None:
        """Let a batch's groups wait for its version, except groups that may be stale."""
        if self.sizes.older_groups is None:
            return
        batch = self.progress.batches.get(iteration)
        started = self._started(group for group, expected in self.iteration_of.items() if expected >= iteration)
        groups = {group for group in started if self.iteration_of[group] == iteration}
        version = trained_on(iteration)
        older = {
            group for group, with_version in started.items() if with_version is not None and with_version < version
        }
        waiting = set(sorted(groups - older)[max(0, self.sizes.older_groups - len(older)) :])
        for group in groups:
            in_batch = batch is not None and group in batch.joined
            bucket = Bucket(iteration, RowState.of(in_batch, group in waiting))
            for name in self.consumers.generating:
                self.tasks[name].move(self.rows_of[group], bucket)

    def _started(self, groups: Iterable[int]) -> dict[int, int | None]:
        """Return, for each of these groups that is not dropped, the oldest version on which its rows were started."""
        verdicts = self.sampling.verdicts
        kept = (group for group in groups if group not in verdicts or verdicts[group].reason is None)
        return {group: self.versions.at_start(self.rows_of[group]) for group in kept}

    def _admit(self, uids: Sequence[Uid], iteration: int) -> None:
        for uid in uids:
            self.rows_of.setdefault(uid[1], []).append(uid)
        self.tasks.admit(uids, lambda uid: uid[1], Bucket(iteration, RowState.OPEN), self.early)
        self.tasks.write(ADMISSION, uids)

    def _skip(self, consumers: Iterable[Consumer], uids: Sequence[Uid]) -> None:
        """Mark rows as done in consumers without a due stage in the open iteration."""
        for consumer in consumers if uids else ():
            if not consumer.due(self.opened):
                self._leave_out(consumer.name, uids)

    def _leave_out(self, name: str, uids: Sequence[Uid]) -> None:
        """Mark rows as done in a consumer: it takes none of them, and no task waits for them."""
        self.tasks.write(name, uids)
        self.tasks[name].finish(uids)

    def forget(self, groups: Iterable[int]) -> dict[Lease, list[Uid]]:
        """Forget groups; return the rows lost, by lease."""
        groups = list(groups)
        uids = [uid for group in groups for uid in self.rows_of.pop(group)]
        lost = self.tasks.forget(uids)
        self.versions.forget(uids)
        for uid in uids if self.tokens else ():
            self.tokens.pop(uid, None)
        for group in groups:
            self.iteration_of.pop(group, None)
            self.resumed_groups.discard(group)
            self.ending.discard(group)
        return lost

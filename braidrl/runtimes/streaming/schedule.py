"""The decisions of the streaming runtime as one state machine: admission, leases, steps, publications. No clock, no
socket, no payload.

    groups_wanted ─▶ admit ─▶ [rows of each consumer: ready, leased, done] ◀─ take, complete ─ workers
          ▲                        │ verdicts on complete groups ─▶ close: the batch is known
          └── published ◀── due_publication ◀── trainers: may_step, stepped, all rows done

The runtime and the simulator drive the same object; time is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes, TrainingBatch, admissible, check_staleness, trained_on
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import Flow
from braidrl.flow.selecting import UNFINISHED, GroupSelector, Selection, Verdict, started_too_many
from braidrl.flow.stage import Kind
from braidrl.queue.samplers import FIRST_IN, Candidate, Sampler
from braidrl.queue.table import Lease
from braidrl.runtimes.streaming.consumers import Bucket, Consumer, Consumers, RowState, TrainingProgress


class StreamSchedule:
    """The schedule of all rows in work: their admission, leases and batches; `progress` is that of the training.

    Each consumer is a task, and the table of a row in it is a `Bucket`.

    A group with a suspended row continues with the next batch as long as it is fresh enough for that batch; other
    groups are generated to completion. A suspended group's slot in the open batch goes to another group.
    """

    def __init__(self, flow: Flow, sizes: Sizes, samplers: Mapping[str, Sampler] | None = None) -> None:
        """Begin a run; stages without one of `samplers` give their oldest rows first."""
        self.flow, self.sizes, self.consumers = flow, sizes, Consumers(flow)
        self.tasks = self.consumers.tasks()
        self.tasks.facts = self._facts
        self.progress = TrainingProgress(self.consumers, self.tasks)
        every = list(self.consumers)
        self.samplers = {c.name: s for c in every for stage in c.stages if (s := (samplers or {}).get(stage.name))}
        self.sampling = GroupSelector(
            sizes.prompts_per_step, sizes.epoch_groups, sizes.surplus, sizes.max_staleness, sizes.over_sampling
        )
        segment = flow.stages[: flow.recorded_stages] if sizes.partial_rollout else flow.sampling_segment
        self.segment = [c for c in every if c.stages[0] in segment and c.kind is not Kind.TRAIN]
        """Consumers of groups that may not be in the batch."""
        self.after = [c for c in every if c not in self.segment and c.takes_rows]
        """Consumers of rows of a batch."""
        self.early = [*self.consumers.verdicts, *(c.name for c in self.segment)]
        """Tasks that rows enter with their admission; they enter the others with their batch."""
        self.rows_of: dict[int, list[Uid]] = {}
        self.iteration_of: dict[int, int] = {}
        """The batch of a group's admission, later the batch that contains it."""
        self.versions: dict[Uid, int] = {}
        """The oldest version among a row's tokens, once it is generated."""
        self.tokens: dict[Uid, int] = {}
        """The known length of a row."""
        self.started: dict[Uid, int] = {}
        """The oldest version of an engine that got a row."""
        self.suspended_rows: dict[Uid, int] = {}
        """The oldest version among the tokens of suspended rows."""
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
        self.max_staleness_seen = 0

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
        self.versions.update(surplus)
        # An engine returns completed rows unchanged.
        rows = unfinished or {}
        self._admit(list(rows), self.opened + 1)
        drawn = {uid: version for uid, version in rows.items() if version is not None}
        self.suspended_rows.update(drawn)
        self.started.update(drawn)
        self.resumed_groups = {uid[1] for uid in rows}
        for group in self.resumed_groups:
            self._continue_in(group, self.opened + 1)

    def restore_batch(self, versions: Mapping[Uid, int]) -> None:
        """Restore a checkpoint's next batch, whose rows have passed the recorded stages, with the version of each
        row.
        """
        self.opened += 1
        batch = self.progress.batches[self.opened] = TrainingBatch.planned(self.sizes, self.opened)
        uids = sorted(versions, key=lambda uid: uid[1:])
        self._admit(uids, self.opened)
        self.versions.update(versions)
        groups = dict.fromkeys(uid[1] for uid in uids)
        self._join_groups(batch, [(group, rank, rank) for rank, group in enumerate(groups)])
        for name in [*self.consumers.recorded, *self.consumers.verdicts]:
            self._leave_out(name, uids)
        batch.is_known = True

    def older_batches(self) -> list[int]:
        """Return the batches from the next to the last open or known one with rows started on an older version."""
        started = (self._started_with(group) for group in self.iteration_of)
        older = [
            iteration
            for iteration, version in zip(self.iteration_of.values(), started, strict=True)
            if iteration <= self.opened and version is not None and version < self.progress.published
        ]
        return list(range(self.progress.published + 1, max(older, default=0) + 1))

    # Admission

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
            if not self.flow[name].when.includes(self.opened):
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
        self.dropped = self._forget(self.released)
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
            if not lacked or any(self._may_start(bucket, engine_version) for bucket in lacked):
                return False
        elif self.may_open(engine_version, early=False):
            return False
        # Rows carried over to the next batch and not yet started may wait for weights that engines have not loaded.
        undone = [pair for name in self.consumers.generating for pair in self.tasks[name].undone.items()]
        waits = any(n for key, n in undone if key.iteration <= self.opened and self._may_start(key, engine_version))
        return not waits and not any(
            lease.task in self.consumers.generating for lease in self.tasks.leases.held.values()
        )

    # Work

    def take(
        self,
        name: str,
        holder: str,
        now: float,
        seconds: float,
        most: int,
        engine_version: int | None = None,
        ranks: int = 1,
        suspects: Set[Uid] = frozenset(),
    ) -> Lease | None:
        """Lease up to `most` ready rows to a worker of a consumer, or return None; some consumers take only whole
        batches.

        An engine that holds `engine_version` gets no rows that would be too stale for training. It gets each of the
        `suspects` alone: if the engine dies again, the row is the cause. Other arguments are as for `Tasks.take`.
        """
        consumer = self.consumers.by_name[name]
        if most <= 0 or not consumer.takes_rows:
            return None
        buckets, coming = list[Bucket](self.tasks[name].ready), self.progress.published + 1
        if consumer.kind is Kind.TRAIN:
            buckets = [bucket for bucket in buckets if bucket == Bucket(coming, RowState.IN_BATCH)]
        elif self.segment and consumer in self.after:
            # Stages after the selection run only for rows of a batch.
            buckets = [bucket for bucket in buckets if bucket.in_batch]
        if consumer.kind is Kind.INFER and consumer.stages[0].role in self.flow.changed_roles:
            # Inference with changing weights uses the version that the batch trains on, at its position in the list.
            before, batch = self.progress.weights_wait[name], self.progress.coming
            has_weights = not before or (
                batch is not None and all(self.progress.is_through(earlier, batch) for earlier in before)
            )
            buckets = [bucket for bucket in buckets if has_weights and bucket.iteration == coming]
        if consumer.kind is not Kind.TRAIN:
            buckets = [bucket for bucket in buckets if self._may_start(bucket, engine_version)]
        if not buckets:
            return None
        bucket = min(buckets)
        if consumer.kind is Kind.TRAIN and self._waits_for_more(name, bucket, ranks):
            return None
        if name in self.consumers.whole_batches:
            batch = self.progress.batches[bucket.iteration]
            rows = batch.uids if batch.is_known and self.tasks[name].are_free(batch.uids) else ()
            lease = self.tasks.lease(name, rows, holder, now, seconds)
        else:
            lease = self.tasks.take(name, holder, now, seconds, most, self.samplers.get(name, FIRST_IN), ranks, bucket)
        if lease is not None and suspects and name in self.consumers.generating:
            lease = self._isolated(lease, now, seconds, suspects)
        if lease is None:
            return None
        if consumer.kind is Kind.GENERATE and engine_version is not None and self.sizes.max_staleness:
            for row in lease.rows:
                self.started[row] = min(
                    engine_version, self.suspended_rows.get(row, engine_version), self.started.get(row, engine_version)
                )
        if consumer.kind is Kind.TRAIN:
            versions = [self.versions[row] for row in lease.rows]
            stale = check_staleness(self.progress.published + 1, versions, self.sizes.max_staleness, lease.rows)
            self.max_staleness_seen = max(self.max_staleness_seen, stale)
        return lease

    def _isolated(self, lease: Lease, now: float, seconds: float, suspects: Set[Uid]) -> Lease | None:
        """Return the lease without suspects, or with a single suspect if the holder is idle; None if the holder may
        take no row now.
        """
        rows = self.tasks.left(lease)
        leased = {row for lease_held in self.tasks.leases.of(lease.holder) for row in self.tasks.left(lease_held)}
        if suspects.isdisjoint(leased):
            return lease
        before = leased.difference(rows)
        chosen = (
            [row for row in rows if row not in suspects] if before else [row for row in rows if row in suspects][:1]
        )
        self.tasks.release(lease, rows)
        # No row runs concurrently with a suspect.
        chosen = chosen if suspects.isdisjoint(before) else []
        return self.tasks.lease(lease.task, chosen, lease.holder, now, seconds)

    def _waits_for_more(self, name: str, bucket: Bucket, ranks: int) -> bool:
        """Return True if a trainer's ranks would get less than a row each, and more rows of the batch are to come: the
        ranks meet for each lease.
        """
        task, batch = self.tasks[name], self.progress.batches[bucket.iteration]
        ready = len(task.ready[bucket].rows) * (batch.samples if task.whole_groups else 1)
        return ready < min(ranks, len(batch.plan) - len(task.lease))

    def done(self, name: str, rows: Sequence[Uid], versions: Mapping[Uid, int] | None = None) -> None:
        """Record that a consumer has completed rows of its leases; for a generate stage, with the oldest version of
        each row.
        """
        self.tasks.write(name, rows)
        if versions and name in self.consumers.generating:
            oldest = self.versions
            if len(self.consumers.generating) == 1:
                oldest.update(versions)
            else:
                oldest.update({row: min(version, oldest.get(row, version)) for row, version in versions.items()})
        if self.sizes.partial_rollout and name in self.consumers.generating and not self.consumers.selects:
            # Without selection a group is kept once its rows are all generated.
            written = [self.tasks.written[stage] for stage in self.consumers.generating]
            for group in {row[1] for row in rows}.intersection(self.sampling.pending):
                uids = self.rows_of[group]
                if all(uids_written.issuperset(uids) for uids_written in written):
                    self.sampling.decide({group: Verdict(version=min(self.versions[uid] for uid in uids))})
                    self.decided = True

    def suspend(self, lease: Lease, rows: Mapping[Uid, int]) -> None:
        """Suspend rows of a lease after their token budget, with the oldest version among their tokens.

        They resume with the next batch; rows that have become too stale for it resume immediately.
        """
        self.tasks.release(lease, list(rows))
        for row, version in rows.items():
            self.suspended_rows[row] = min(version, self.suspended_rows.get(row, version))
        for group, row in {row[1]: row for row in rows}.items():
            self.resumed_groups.add(group)
            if self.may_suspend(row):
                self._continue_in(group, self.opened + 1)
                if self.is_open and group in self.sampling.pending:
                    self.sampling.decide({group: Verdict(UNFINISHED)})
        self.decided = True

    def groups_to_judge(self, name: str) -> list[Uid]:
        """Take all groups that are ready for a verdict stage, mark them as completed, and return their rows."""
        task, rows = self.tasks[name], list[Uid]()
        for bucket in list(task.ready):
            rows += task.take(bucket, len(task.numbers) + 1, 1, FIRST_IN, self._facts)
        task.finish(rows)
        return rows

    def judged(
        self,
        name: str,
        rows: Sequence[Uid],
        reasons: Mapping[int, str] | None = None,
        scores: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """Record a verdict stage's result on the rows of some complete groups.

        A select stage drops groups for `reasons`; `scores` are their lowest and highest scores.
        """
        dropped = reasons or {}
        self.tasks.write(name, [row for row in rows if row[1] not in dropped] if dropped else rows)
        if name not in self.consumers.selects:
            return
        for group in dict.fromkeys(row[1] for row in rows):
            if group in dropped or name == self.consumers.selects[-1]:
                version = min(self.versions[row] for row in self.rows_of[group])
                self.sampling.decide({group: Verdict(dropped.get(group), version, (scores or {}).get(group))})
        self._assign()
        self.decided = True

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is complete and its rows are forgotten."""
        batch = self.progress.publish()
        self._forget(batch.joined)
        return batch

    def _facts(self, uid: Uid) -> Candidate:
        group = uid[1]
        return Candidate(uid, group, len(self.rows_of[group]), self.tokens.get(uid, 0), self.versions.get(uid, 0))

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

    def _started_with(self, group: int) -> int | None:
        """Return the oldest version on which a group's rows were started; None if none was started."""
        uids = self.rows_of[group]
        versions = (
            *(self.started[uid] for uid in uids if uid in self.started),
            *(self.versions[uid] for uid in uids if uid in self.versions),
        )
        return min(versions, default=None)

    def _is_young(self, group: int) -> bool:
        """Return True if a group's started rows may be in the batch after the open one."""
        version = self._started_with(group)
        return version is None or admissible(self.opened + 1, version, self.sizes.max_staleness)

    # Suspended rows

    def may_suspend(self, row: Uid) -> bool:
        """Return True if a row may train with the batch after the open one, and thus does not delay the open one."""
        return self.sizes.partial_rollout and row[1] not in self.ending and self._is_young(row[1])

    def _continue_in(self, group: int, iteration: int) -> None:
        """Move a group to an iteration; its unfinished rows continue there."""
        self.iteration_of[group] = iteration
        for name in self.early:
            state = RowState.RESUMED if name in self.consumers.generating else RowState.OPEN
            self.tasks[name].move(self.rows_of[group], Bucket(iteration, state))

    # A share of rows of the batch's own version

    def _may_start(self, bucket: Bucket, engine_version: int | None) -> bool:
        """Return True if an engine's version is fresh enough for the rows of a bucket; None means a worker without an
        engine.
        """
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

    def _assign(self) -> None:
        """Assign undecided groups to the open batch as far as needed, others to later batches; hold back groups without
        a slot.
        """
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
        return {group: self._started_with(group) for group in kept}

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

    def _forget(self, groups: Iterable[int]) -> dict[Lease, list[Uid]]:
        """Forget groups; return the rows lost, by lease."""
        groups = list(groups)
        uids = [uid for group in groups for uid in self.rows_of.pop(group)]
        lost = self.tasks.forget(uids)
        for by_row in (self.versions, self.tokens, self.suspended_rows, self.started):
            for uid in uids if by_row else ():
                by_row.pop(uid, None)
        for group in groups:
            self.iteration_of.pop(group, None)
            self.resumed_groups.discard(group)
            self.ending.discard(group)
        return lost

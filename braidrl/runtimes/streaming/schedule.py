"""The decisions of the streaming runtime as one state machine: admission, leases, steps, publications. No clock, no
socket, no payload.

    GroupAdmission: groups_wanted ─▶ admit ─▶ [rows of each consumer: ready, leased, done] ◀─ take, done ─ workers
          ▲                                         │ judged: verdicts on complete groups ─▶ close: the batch is known
          └── publish ◀── TrainingProgress: may_step, stepped, due_publication ◀── all rows done

The runtime and the simulator drive the same object; time is an argument.
"""

from collections.abc import Mapping, Sequence, Set

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes, TrainingBatch, check_staleness
from braidrl.flow.flow import Flow
from braidrl.flow.stage import Kind
from braidrl.queue.samplers import FIRST_IN, Candidate, Sampler
from braidrl.queue.table import Lease
from braidrl.runtimes.streaming.admission import GroupAdmission, RowVersions
from braidrl.runtimes.streaming.consumers import Bucket, Consumers, RowState, TrainingProgress


class StreamSchedule:
    """The schedule of all rows in work: `admission` of their groups to batches, leases, and `progress` of training.

    Each consumer is a task, and the table of a row in it is a `Bucket`.
    """

    def __init__(self, flow: Flow, sizes: Sizes, samplers: Mapping[str, Sampler] | None = None) -> None:
        """Begin a run; stages without one of `samplers` give their oldest rows first."""
        self.flow, self.sizes, self.consumers = flow, sizes, Consumers(flow)
        self.tasks = self.consumers.tasks()
        self.tasks.facts = self._facts
        self.progress, self.versions = TrainingProgress(self.consumers, self.tasks), RowVersions()
        self.admission = GroupAdmission(sizes, self.consumers, self.tasks, self.progress, self.versions)
        self.samplers = {
            c.name: s for c in self.consumers for stage in c.stages if (s := (samplers or {}).get(stage.name))
        }
        self.max_staleness_seen = 0

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
        elif self.admission.segment and consumer in self.admission.after:
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
            buckets = [bucket for bucket in buckets if self.admission.may_start(bucket, engine_version)]
        if not buckets:
            return None
        bucket = min(buckets)
        if consumer.kind is Kind.TRAIN and self._waits_for_more(name, bucket, most, ranks):
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
            self.versions.start(lease.rows, engine_version)
        if consumer.kind is Kind.TRAIN:
            versions = [self.versions.oldest[row] for row in lease.rows]
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

    def _waits_for_more(self, name: str, bucket: Bucket, most: int, ranks: int) -> bool:
        """Return True if a trainer of several ranks should wait for more rows of the batch.

        The ranks meet for each lease, so it has at least a row for each rank. Up to `most` rows, it has as many as the
        update already has, at most half of those that it lacks: leases grow, and shrink again so that little work is
        left when the last row comes. Their number grows with the logarithm of the rows of a rank.
        """
        if ranks == 1:
            return False
        task, batch = self.tasks[name], self.progress.batches[bucket.iteration]
        ready, taken = len(task.ready[bucket].rows) * (batch.samples if task.whole_groups else 1), len(task.lease)
        of_update = taken % batch.size
        wanted = max(ranks, min(of_update, (batch.size - of_update) // 2))
        return ready < min(wanted, most, len(batch.plan) - taken)

    def done(self, name: str, rows: Sequence[Uid], versions: Mapping[Uid, int] | None = None) -> None:
        """Record that a consumer has completed rows of its leases; with each generated row's oldest version."""
        self.tasks.write(name, rows)
        if versions and name in self.consumers.generating:
            oldest = self.versions.oldest
            if len(self.consumers.generating) == 1:
                oldest.update(versions)
            else:
                oldest.update({row: min(version, oldest.get(row, version)) for row, version in versions.items()})
        if self.sizes.partial_rollout and name in self.consumers.generating and not self.consumers.selects:
            self.admission.keep_generated(rows)

    def suspend(self, lease: Lease, rows: Mapping[Uid, int]) -> None:
        """Suspend rows of a lease after their token budget, with the oldest version among their tokens.

        They resume with the next batch; rows that have become too stale for it resume immediately.
        """
        self.tasks.release(lease, list(rows))
        self.versions.suspend(rows)
        self.admission.suspend(rows)

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
        verdicts = {
            group: self.admission.verdict(group, dropped.get(group), (scores or {}).get(group))
            for group in dict.fromkeys(row[1] for row in rows)
            if group in dropped or name == self.consumers.selects[-1]
        }
        self.admission.decide(verdicts)

    def publish(self) -> TrainingBatch:
        """Publish the due version; its batch is complete and its rows are forgotten."""
        batch = self.progress.publish()
        self.admission.forget(batch.joined)
        return batch

    def _facts(self, uid: Uid) -> Candidate:
        group, tokens = uid[1], self.admission.tokens.get(uid, 0)
        return Candidate(uid, group, len(self.admission.rows_of[group]), tokens, self.versions.oldest.get(uid, 0))

"""One flow's rows in the queue: the schedule that decides, the table that holds them, and a record of each iteration.

admit ──▶ table ◀──take: payload locations─▶ complete: index columns ─▶ verdicts ─▶ close the batch ─▶ publish ─▶ record
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.codec import encode
from braidrl.data.messages import Frame
from braidrl.data.rows import Rows, Uid
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import Sizes, trained_on
from braidrl.flow.columns import ADMISSION
from braidrl.flow.compute import State, computed, dropped, next_state
from braidrl.flow.selecting import GroupSelector, Selection, scores_by_group
from braidrl.queue.samplers import Sampler
from braidrl.queue.table import Block, HeldBlocks, Positions, StoredRows, Table
from braidrl.runtimes.interfaces import StartedBatch
from braidrl.runtimes.streaming.schedule import StreamSchedule
from braidrl.runtimes.streaming.work import BatchPlan, LeasedRows, TakeWork

Report = dict[str, Any]
"""A worker's report on a stage: metric sums, seconds. The queue passes it on."""
DRAWN = "drawn"
"""Writer name of the columns of suspended rows' generate stage."""


@dataclass
class IterationRecord:
    """The record of an iteration so far; after its publication also its rows, as recorded and with every column."""

    iteration: int
    outcome: Selection | None = None
    generated: list[Rows] = field(default_factory=list)
    """Index columns of rows that were generated and dropped."""
    reports: list[Report] = field(default_factory=list)
    training: list[Report] = field(default_factory=list)
    """Reports of trainers, which repeat their work if one is lost."""
    states: dict[str, State] = field(default_factory=dict)
    """The values of stages with a state that have completed."""
    table: StoredRows = field(default_factory=lambda: StoredRows(Rows({})))
    final: StoredRows = field(default_factory=lambda: StoredRows(Rows({})))


class Stream:
    """The rows of one flow."""

    def __init__(
        self,
        flow: Flow,
        sizes: Sizes,
        during: int | None = None,
        samplers: Mapping[str, Sampler] | None = None,
        held: HeldBlocks | None = None,
    ) -> None:
        """Start without rows.

        An evaluation's work is shown under the training iteration `during`. `samplers` are those of stages that do not
        take the oldest rows first; `held` counts references to the blocks of all streams of a run.
        """
        self.during = during
        self.flow, self.schedule, self.table = flow, StreamSchedule(flow, sizes, samplers), Table(held)
        self.consumers = self.schedule.consumers
        self.tasks = self.schedule.tasks
        self.before = {name: self.consumers.before(name) for name in self.tasks.tasks}
        self.inputs = {
            consumer.name: {column.name for stage in consumer.stages for column in flow.inputs[stage.name]}
            for consumer in self.consumers.by_name.values()
        }
        self.partial_rollout = sizes.partial_rollout
        generates = [flow[name] for name in self.schedule.consumers.generating]
        self.drawn = [name for stage in generates for name in stage.writes] if sizes.partial_rollout else []
        """Columns of suspended rows."""
        self.written_before_recording = {name for s in flow.stages[: flow.recorded_stages] for name in s.writes}
        self.written_later = {name for s in flow.stages[flow.recorded_stages :] for name in s.writes}
        self.records: dict[int, IterationRecord] = {}
        self.states = {stage.name: dict(stage.state) for stage in flow.stages if stage.state}
        """The values of stages with a state for the next batch."""

    # Rows in and out

    def admit(self, rows: StoredRows) -> None:
        """Admit rows; if they may be suspended, with their tokens."""
        self.schedule.admission.admit(rows.uids())
        self._add_admitted(rows)

    def _add_admitted(self, rows: StoredRows) -> None:
        drawn = set(self.drawn).intersection(rows.columns)
        if self.schedule.samplers:
            self._note_lengths(rows.uids(), rows.index.without(list(drawn)))
        self.table.add(rows.part(ADMISSION, [name for name in rows.columns if name not in drawn]))
        if drawn:
            self.table.add(rows.part(DRAWN, drawn))

    def resume(self, done: int, state: Mapping[str, Any], tables: Sequence[StoredRows]) -> None:
        """Resume after `done` iterations with a checkpoint's selection state and rows: those of groups that wait for
        the next batch, and of pending groups.
        """
        sampling = GroupSelector.restored(state)
        surplus, unfinished = list[StoredRows](), list[StoredRows]()
        for table in tables:
            (unfinished if set(table.index["group"].tolist()) <= set(sampling.pending) else surplus).append(table)
        versions = {
            uid: version
            for rows in surplus
            for uid, version in zip(rows.uids(), rows.index["version"].tolist(), strict=True)
        }
        drawn_on: dict[Uid, int | None] = {}
        for index in (rows.index for rows in unfinished):
            triples = zip(index.uids(), index["version"].tolist(), index["action_tokens"].tolist(), strict=True)
            drawn_on |= {uid: version if tokens else None for uid, version, tokens in triples}
        self.schedule.admission.resume(done, sampling, versions, drawn_on)
        for rows in surplus:
            self.restore(rows)
        for rows in unfinished:
            self._add_admitted(rows)

    def unfinished(self, groups: Collection[int]) -> list[StoredRows]:
        """Return the rows of continuing groups as they left the generate stage: completed rows, then the others."""
        (stage,) = self.schedule.consumers.generating
        ended: dict[bool, list[Uid]] = {True: [], False: []}
        for uid in (uid for group in groups for uid in self.schedule.admission.rows_of[group]):
            ended[uid in self.table.parts.get(stage, {})].append(uid)
        later = [name for s in self.flow.stages if s.name != stage for name in s.writes]
        tables = {
            was: self.table.stored(uids, [ADMISSION, stage if was else DRAWN]) for was, uids in ended.items() if uids
        }
        return [self.table.held.hold_for(rows.without(later)) for rows in tables.values()]

    def restore(self, rows: StoredRows) -> None:
        """Restore a checkpoint's rows that have passed its recorded stages, as if the stages had written them here."""
        wrote = self.written_before_recording | self.written_later
        self.table.add(rows.part(ADMISSION, [name for name in rows.columns if name not in wrote]))
        written = [name for name in rows.columns if name in wrote]
        if self.schedule.consumers.recorded:
            self.table.add(rows.part(self.schedule.consumers.recorded[0], written))
        if self.schedule.samplers:
            self._note_lengths(rows.uids(), rows.index)

    def started(self) -> list[int]:
        """Return the batches to save, started on older versions; all other rows are generated again after a resume.

        Empty for flows where a stage before the recording changes state or weights, or waits for its turn. Empty also
        if rows may be suspended: the checkpoint then has all rows in work.
        """
        recorded = self.flow.stages[: self.flow.recorded_stages]
        waits = any(
            s.state or s.kind is Kind.TRAIN or (s.kind is Kind.INFER and s.role in self.flow.changed_roles)
            for s in recorded
        )
        return [] if waits or self.partial_rollout else self.schedule.admission.older_batches()

    def restore_batch(self, batch: StartedBatch) -> None:
        """Restore a checkpoint's batch as the next one."""
        rows: StoredRows = batch.table
        self.schedule.admission.restore_batch(dict(zip(rows.uids(), versions_of(rows.index), strict=True)))
        record = self.record_of(self.schedule.admission.opened)
        record.outcome, record.reports = batch.outcome, list(batch.reports)
        record.generated = [batch.left_out.index] if len(batch.left_out) else []
        self.restore(rows)

    def stored(self, uids: Sequence[Uid], recorded: bool = False) -> StoredRows:
        """Return rows with all their columns; with `recorded` only the columns up to the recorded stages."""
        early = {ADMISSION, *self.schedule.consumers.recorded, *self.consumers.verdicts}
        writers = [name for name in self.consumers.writers if name in early or not recorded]
        rows = self.table.stored(uids, writers)
        later = self.written_later - self.written_before_recording
        return self.table.held.hold_for(rows.without(later)) if recorded and later else rows

    # Work

    def take(
        self,
        name: str,
        request: TakeWork,
        most: int,
        now: float,
        seconds: float,
        version: int | None,
        deaths: RowDeaths,
    ) -> tuple[LeasedRows, Sequence[Frame]] | None:
        """Lease up to `most` rows of a consumer to the requesting worker, or return None.

        `version` is the one that the worker's engine holds. `deaths` lists rows that are not generated any more, or
        only alone. Other arguments are as for `StreamSchedule.take`.
        """
        schedule = self.schedule
        lease = schedule.take(name, request.holder, now, seconds, most, version, request.ranks, deaths.suspects)
        if lease is None:
            return None
        consumer, uids = self.consumers.by_name[name], lease.rows
        # All index columns, and the payload that its stages declare. Columns computed by the main process are in no
        # block; several ranks get all index columns by value, and no rank reads the blocks of others for them.
        on_ranks = request.ranks > 1
        inline = [writer for writer in self.before[name] if on_ranks or writer in self.consumers.verdicts]
        writers = [writer for writer in self.before[name] if writer not in self.consumers.verdicts]
        payload = self.table.payload(uids, writers, self.inputs[name], index=not on_ranks)
        if self.partial_rollout and consumer.kind is Kind.GENERATE:
            payload += self.table.payload(uids, [DRAWN], None, index=True)
        answer = LeasedRows(
            consumer=name,
            lease=lease.number,
            size=len(uids),
            iteration=schedule.admission.iteration_of[uids[0][1]] if self.during is None else self.during,
            payload=payload,
            states={s.name: self.states[s.name] for s in consumer.stages if s.state},
        )
        if consumer.kind is Kind.GENERATE and deaths.left_out:
            answer.left_out = [n for n, uid in enumerate(uids) if uid in deaths.left_out]
        if self.partial_rollout and consumer.kind is Kind.GENERATE:
            answer.to_the_end = [n for n, uid in enumerate(uids) if not schedule.admission.may_suspend(uid)]
        if consumer.kind is Kind.TRAIN:
            batch = schedule.progress.batches[schedule.progress.published + 1]
            answer.batch = BatchPlan(batch.updates_of(uids), batch.size, batch.steps, len(batch.plan))
        computed_here = self.table.index(uids, inline)
        return answer, encode(computed_here) if list(computed_here) else ()

    def done(
        self,
        name: str,
        done: Positions,
        parts: Sequence[tuple[StoredRows, Positions]],
        now: float,
        unfinished: bool = False,
    ) -> tuple[list[int], list[Block]]:
        """Record rows of a consumer as completed, or as suspended with their tokens; return lost leases, and blocks to
        free.
        """
        lost, rows_by_lease = self.tasks.rows_by_lease(done, parts, now)
        freed, versions = list[Block](), dict[Uid, int]()
        for part, _ in parts:
            # A generate stage writes the oldest version of each row.
            if (column := next(filter(is_version, part.index), None)) is not None:
                drawn = part.index[column].tolist()
                versions.update({uid: drawn[position] for uid, position in part.rows.items()})
                # A row without tokens is as fresh as its batch.
                tokens = part.index.get(f"{column.removesuffix('version')}action_tokens")
                empty = [uid for uid, position in part.rows.items() if tokens is not None and not tokens[position]]
                versions.update({uid: trained_on(self.schedule.admission.iteration_of[uid[1]]) for uid in empty})
        for lease, rows in rows_by_lease.items():
            if unfinished:
                self.schedule.suspend(lease, {row: versions[row] for row in rows})
            else:
                self.tasks.finish(lease, rows)
        for part, _ in parts:
            part.writer = DRAWN if unfinished else name
            if part.rows:
                if self.schedule.samplers:
                    self._note_lengths(list(part.rows), part.index, list(part.rows.values()))
                freed += self.table.replace(part)
            else:
                freed += part.blocks
        if not unfinished:
            self.schedule.done(name, [row for rows in rows_by_lease.values() for row in rows], versions)
        return lost, freed

    def decide(self) -> None:
        """Run the verdict stages on all groups that are ready for them."""
        for name in self.consumers.verdicts:
            rows = self.schedule.groups_to_judge(name)
            if not rows:
                continue
            stage, index = self.flow[name], self.table.index(rows, self.before[name])
            if stage.kind is not Kind.SELECT:
                columns = computed(stage, index)
                self.table.add(StoredRows(Rows(columns), [], name, {uid: n for n, uid in enumerate(rows)}))
                self.schedule.judged(name, rows)
                continue
            reasons = dropped(stage, index)
            dropped_positions = [position for position, uid in enumerate(rows) if uid[1] in reasons]
            self.schedule.judged(
                name, rows, reasons, scores_by_group(index.take(dropped_positions)) if dropped_positions else {}
            )

    def close(self) -> list[Block] | None:
        """End selection if it is complete; return the blocks to free, or None."""
        outcome = self.schedule.admission.close()
        if outcome is None:
            return None
        record, groups = self.record_of(self.schedule.admission.opened), self.schedule.admission.released
        released = [uid for rows in groups.values() for uid in rows]
        record.outcome = outcome
        # Groups outside the batch count only if they passed all stages of the segment.
        due = [self.consumers.by_name[name] for name in self.schedule.consumers.recorded]
        parts_of_due = [self.table.parts.get(consumer.name, {}) for consumer in due if consumer.due(record.iteration)]
        complete = [g for g in outcome.released if all(uid in parts for uid in groups[g] for parts in parts_of_due)]
        generated = [uid for g in complete for uid in groups[g]]
        if generated:
            index = self.table.index(generated, self.consumers.writers)
            record.generated.append(index.without(list(self.written_later - self.written_before_recording)))
        return self.table.evict(released)

    def publish(self) -> tuple[IterationRecord, list[Block]]:
        """Publish the due version; return the batch's record, and the blocks freed with its rows."""
        batch = self.schedule.progress.batches[self.schedule.progress.published + 1]
        record = self.records.pop(batch.iteration)
        assert record.outcome is not None
        uids = batch.uids
        record.final = self.stored(uids)
        if self.written_later.isdisjoint(self.written_before_recording):
            record.table = self.table.held.hold_for(record.final.without(self.written_later))
        else:
            record.table = self.stored(uids, recorded=True)
        record.reports += record.training
        self.schedule.publish()
        return record, self.table.evict(uids)

    def train_again(self) -> None:
        """Reset training towards the next version, and discard its trainers' reports."""
        self.schedule.progress.train_again()
        record = self.record_of(self.schedule.progress.published + 1)
        # A repeated batch starts with its initial states.
        self.states |= record.states
        record.training, record.states = [], {}

    def updates_of(self, role: str, iteration: int) -> list[Stage]:
        """Return the train stages that change a role's weights in an iteration."""
        stages = self.flow.stages
        return [s for s in stages if s.kind is Kind.TRAIN and s.role == role and s.when.includes(iteration)]

    def record_of(self, iteration: int) -> IterationRecord:
        """Return the record of an iteration in progress."""
        return self.records.setdefault(iteration, IterationRecord(iteration))

    def report(
        self, name: str, iteration: int, reports: Sequence[Report], totals: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Add a consumer's reports on rows of an iteration to its record; update stage states for the next batch.

        `totals` are sums over the batch of each stage with a state.
        """
        record = self.record_of(iteration)
        trains = self.consumers.by_name[name].kind is Kind.TRAIN
        (record.training if trains else record.reports).extend(reports)
        for stage, stage_totals in totals.items():
            if self.consumers.reporting[stage] == name:
                record.states[stage] = self.states[stage]
                self.states[stage] = next_state(self.flow[stage], self.states[stage], stage_totals)

    def _note_lengths(self, uids: Iterable[Uid], index: Rows, positions: Sequence[int] | None = None) -> None:
        """Pass samplers the lengths of rows, at some positions of `index` or all, as soon as they are known."""
        name = next((name for name in ("length", "prompt_length") if name in index), None)
        if name is not None:
            lengths = index[name] if positions is None else index[name][positions]
            self.schedule.admission.tokens.update(zip(uids, lengths.tolist(), strict=True))


def versions_of(rows: Rows) -> list[int]:
    """Return the oldest version that generated each row."""
    versions: list[int] = torch.stack([rows[name] for name in rows.index if is_version(name)]).amin(0).tolist()
    return versions


def is_version(name: str) -> bool:
    """Return True if a column holds the version that generated rows, in any namespace."""
    return name.rsplit(".", 1)[-1] == "version"

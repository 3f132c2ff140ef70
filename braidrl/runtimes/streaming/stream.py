"""One flow's rows in the queue: the schedule that decides, the table that holds them, and a record of each iteration.

admit ──▶ table ◀──take: index columns, payload locations──▶ acknowledge ──▶ close the batch ──▶ publish ──▶ record
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from braidrl.data.codec import encode
from braidrl.data.rows import FinishReason, Rows
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import Sizes
from braidrl.flow.columns import ADMISSION
from braidrl.flow.compute import State, initial_states, next_state
from braidrl.flow.readiness import Uid, waits_for
from braidrl.flow.selecting import GroupSelector, Selection, scores_by_group
from braidrl.queue.requests import Answer
from braidrl.queue.samplers import Sampler
from braidrl.queue.table import Block, HeldBlocks, StoredPart, StoredRows, Table
from braidrl.queue.tasks import Lease, LeaseLost
from braidrl.runtimes.interfaces import BegunBatch
from braidrl.runtimes.streaming.schedule import StreamSchedule, UnfinishedRow

Report = dict[str, Any]
"""A worker's report on a piece of work: metric sums, seconds. The queue passes it on."""
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
    states: dict[str, State] = field(default_factory=dict)
    """The values of stages with a state that have completed."""
    table: StoredRows = field(default_factory=lambda: StoredRows(Rows({})))
    final: StoredRows = field(default_factory=lambda: StoredRows(Rows({})))


class Stream:
    """The rows of one flow."""

    def __init__(
        self, flow: Flow, sizes: Sizes, during: int | None = None, samplers: Mapping[str, Sampler] | None = None,
        held: HeldBlocks | None = None,
    ) -> None:  # fmt: skip
        """Begin without rows.

        Args:
            flow: The stages.
            sizes: Sizes of batches and updates.
            during: Training iteration under which an evaluation's work is shown.
            samplers: Samplers of stages that do not take the oldest rows first.
            held: Reference counts of the blocks of all streams of a run.
        """
        self.during = during
        self.flow, self.schedule, self.table = flow, StreamSchedule(flow, sizes, samplers), Table(held)
        self.stages = {stage.name for stage in flow.stages}
        self.writers = [ADMISSION, *(stage.name for stage in flow.stages)]
        self.readable = {stage.name: writers_before(flow, stage) for stage in flow.stages}
        self.sets_aside = sizes.sets_aside
        self.records: dict[int, IterationRecord] = {}
        self.states = StageStates(flow)

    @property
    def recorded_writers(self) -> list[str]:
        """Return the writers of a row when it is recorded."""
        return self.writers[: 1 + self.flow.recorded_stages]

    def admit(self, rows: StoredRows) -> None:
        """Admit rows; if they may be suspended, with their tokens."""
        uids, drawn = rows.uids(), self._drawn_columns(rows)
        self.schedule.admit(uids)
        self._note_lengths(uids, rows.index.without(drawn))
        self.table.add(rows.part(ADMISSION, [name for name in rows.columns if name not in drawn]))
        if drawn:
            self.table.add(rows.part(DRAWN, drawn))

    def _drawn_columns(self, rows: StoredRows) -> list[str]:
        """Return the drawn columns of rows that may be suspended."""
        generates = [stage for stage in self.flow.stages if stage.name in self.schedule.generating]
        known = set(rows.columns)
        return [name for stage in generates for name in stage.writes if name in known] if self.sets_aside else []

    def resume(self, done: int, state: Mapping[str, Any], tables: Sequence[StoredRows]) -> None:
        """Resume after `done` iterations.

        Args:
            done: Number of iterations.
            state: State of the selection.
            tables: Rows of a checkpoint: of groups that wait for the next batch, and of pending ones.
        """
        sampling = GroupSelector.restored(state)
        surplus, unfinished = list[StoredRows](), list[StoredRows]()
        for table in tables:
            (unfinished if set(table.index["group"].tolist()) <= set(sampling.pending) else surplus).append(table)
        versions = {
            uid: version for rows in surplus for uid, version in zip(rows.uids(), rows.index["version"].tolist(), strict=True)
        }  # fmt: skip
        known = {uid: row for rows in unfinished for uid, row in unfinished_rows(rows.index).items()}
        self.schedule.resume(done, sampling, versions, known)
        for rows in surplus:
            self.restore(rows)
        for rows in unfinished:
            self._resume_rows(rows)

    def unfinished(self, groups: Collection[int]) -> list[StoredRows]:
        """Return the rows of continuing groups: first the completed rows, then the others."""
        (stage,) = self.schedule.generating
        ended: dict[bool, list[Uid]] = {True: [], False: []}
        for uid in (uid for group in groups for uid in self.schedule.rows_of[group]):
            ended[uid in self.table.parts.get(stage, {})].append(uid)
        writers = {True: [ADMISSION, stage], False: [ADMISSION, DRAWN]}
        return [self.table.stored(uids, writers[was]) for was, uids in ended.items() if uids]

    def train_again(self) -> None:
        """Forget the training towards the next version, and its trainers' reports."""
        self.schedule.train_again()
        record = self.record_of(self.schedule.published + 1)
        record.reports = [told for told in record.reports if self.flow[told["stage"]].kind is not Kind.TRAIN]

    def restore(self, rows: StoredRows) -> None:
        """Restore rows of a checkpoint as if their stages had written them here."""
        recorded, names = self.flow.stages[: self.flow.recorded_stages], rows.columns
        checks = next((s.name for s in recorded if s.type == "verify"), ADMISSION)
        last: dict[str, str] = {name: ADMISSION if name in BORN_WITH else checks for name in names}
        for stage in recorded:
            last.update(dict.fromkeys((name for name in stage.writes if name in last), stage.name))
        for writer in dict.fromkeys(last.values()):
            self.table.add(rows.part(writer, [name for name, chosen in last.items() if chosen == writer]))

    def begun(self) -> list[int]:
        """Return the batches to save: started on older versions; all other rows are drawn again after a resume.

        Empty for flows where a stage changes something permanently, or waits for its turn, before rows are recorded. Empty also if
        rows
        may be suspended: the checkpoint then has all rows in work.
        """
        recorded = self.flow.stages[: self.flow.recorded_stages]
        waits = any(
            s.state or s.kind is Kind.TRAIN or (s.kind is Kind.INFER and s.role in self.flow.changed_roles)
            for s in recorded
        )
        return [] if waits or self.sets_aside else self.schedule.older_batches()

    def put_back(self, batch: BegunBatch) -> None:
        """Restore a checkpoint's batch as the next one."""
        rows: StoredRows = batch.table
        self.schedule.put_back(dict(zip(rows.uids(), versions_of(rows.index), strict=True)))
        record = self.record_of(self.schedule.opened)
        record.outcome, record.reports = batch.outcome, list(batch.reports)
        record.generated = [batch.left_out.index] if len(batch.left_out) else []
        self.restore(rows)
        self._note_lengths(rows.uids(), rows.index)

    def read(self, stage: str, uids: Sequence[Uid]) -> tuple[Rows, list[dict[str, Any]]]:
        """Return the input of a stage: index columns, and the locations of the payload that it declares."""
        wanted = {column.name for column in self.flow.inputs[stage]}
        writers = self.readable[stage]
        index, payload = self.table.index(uids, writers), self.table.payload(uids, writers, wanted)
        if self.sets_aside and stage in self.schedule.generating:
            index = index.with_columns(dict(self.table.index(uids, [DRAWN]).items()))
            payload += self.table.payload(uids, [DRAWN], None)
        return index, payload

    def take(
        self, stage: Stage, request: Mapping[str, Any], now: float, seconds: float, version: int | None
    ) -> Answer | None:
        """Lease rows as a worker requested, or return None.

        Args:
            stage: The stage that takes them.
            request: `holder`, `most` rows, `single` leases for each row, stages that take `whole` updates, `ranks` that share them.
            now: Time in seconds, on the controller's clock.
            seconds: Duration of each lease without renewal.
            version: Version that the engine holds.
        """
        if request["single"]:
            found = self.schedule.take_each(stage.name, request["holder"], now, seconds, request["most"], version)
        else:
            lease = self.schedule.take(
                stage.name, request["holder"], now, seconds, request["most"], stage.name in request["whole"], version,
                request["ranks"],
            )  # fmt: skip
            found = [lease] if lease else []
        uids = [uid for lease in found for uid in lease.rows]
        if not uids:
            return None
        index, payload = self.read(stage.name, uids)
        answer = {
            "kind": "rows", "stage": stage.name, "leases": [[lease.number, len(lease.rows)] for lease in found],
            "iteration": self.schedule.iteration_of[uids[0][1]] if self.during is None else self.during,
            "payload": payload, "state": self.states.values.get(stage.name, {}),
        }  # fmt: skip
        if self.sets_aside and stage.kind is Kind.GENERATE:
            answer["to_the_end"] = [lease.number for lease in found if not self.schedule.may_suspend(lease)]
        return answer, encode(index)

    def acknowledge(
        self, leases: Sequence[int], parts: Sequence[StoredPart], now: float, totals: Mapping[str, float] | None = None
    ) -> list[int]:
        """Record written work; return the numbers of lost leases, whose rows are left out.

        `totals` are the sums of a lease's rows for the stage's state.
        """
        held = self.schedule.tasks.leases.held
        rows = [uid for number in leases if number in held for uid in held[number].rows]
        versions = {uid: version for part in parts for uid, version in oldest(part).items()}
        done, lost = self.schedule.acknowledge_all(leases, now, dict.fromkeys(rows, 0) | versions)
        kept = {uid for lease in done for uid in lease.rows}
        for lease in done if totals else ():
            self._follow(lease, totals or {})
        for part in parts:
            part.rows = {uid: place for uid, place in part.rows.items() if uid in kept}
            if part.rows:
                self._note_lengths(list(part.rows), part.index.take(list(part.rows.values())))
                self.table.add(part)
        return lost

    def suspend(self, leases: Sequence[int], parts: Sequence[StoredPart], now: float) -> tuple[list[int], list[Block]]:
        """Record the tokens of suspended rows; return the lost leases, and the blocks that are now free."""
        versions = {uid: version for part in parts for uid, version in oldest(part).items()}
        lost, kept = list[int](), set[Uid]()
        for number in leases:
            try:
                held = self.schedule.tasks.leases.held.get(number)
                version = min(versions[uid] for uid in held.rows) if held else 0
                kept.update(self.schedule.suspend(number, now, version).rows)
            except LeaseLost:
                lost.append(number)
        freed = list[Block]()
        for part in parts:
            part.writer, part.rows = DRAWN, {uid: place for uid, place in part.rows.items() if uid in kept}
            if part.rows:
                self._note_lengths(list(part.rows), part.index.take(list(part.rows.values())))
                freed += self.table.replace(part)
            elif part.block is not None:
                freed.append(part.block)
        return lost, freed

    def select(self, number: int, reasons: Mapping[int, str | None], now: float) -> list[int]:
        """Record a select stage's verdicts by group; return the lease's number if it was lost."""
        held = self.schedule.tasks.leases.held.get(number)
        lost = [uid for uid in held.rows if reasons[uid[1]] is not None] if held else []
        scores = scores_by_group(self.read(held.task.stage, lost)[0]) if held and lost else {}
        try:
            self.schedule.select(number, now, dict(reasons), scores)
        except LeaseLost:
            return [number]
        return []

    def close(self) -> list[Block] | None:
        """End selection if it is complete; return the blocks that are now free, or None."""
        outcome = self.schedule.close()
        if outcome is None:
            return None
        record, groups = self.record_of(self.schedule.opened), self.schedule.released
        released, iteration = [uid for rows in groups.values() for uid in rows], record.iteration
        record.outcome = outcome
        # Of groups outside the batch only those count that came through the whole segment.
        recorded = self.flow.stages[: self.flow.recorded_stages]
        writers = [s.name for s in recorded if s.kind is not Kind.SELECT and s.when.includes(iteration)]
        known = [self.table.parts.get(name, {}) for name in writers]
        whole = [g for g in outcome.released if all(uid in parts for uid in groups[g] for parts in known)]
        generated = [uid for g in whole for uid in groups[g]]
        if generated:
            record.generated.append(self.table.index(generated, self.recorded_writers))
        return self.table.evict(released)

    def publish(self) -> tuple[IterationRecord, list[Block]]:
        """Publish the due version; return the batch's record, and the blocks freed with its rows."""
        batch = self.schedule.batches[self.schedule.published + 1]
        record = self.records.pop(batch.iteration)
        assert record.outcome is not None
        uids = sorted(batch.uids, key=lambda uid: uid[1:])
        record.table = self.table.stored(uids, self.recorded_writers)
        record.final = self.table.stored(uids, self.writers)
        self.schedule.publish()
        return record, self.table.evict(uids)

    def leases(self) -> Collection[Lease]:
        """Return all active leases."""
        return self.schedule.tasks.leases.held.values()

    def record_of(self, iteration: int) -> IterationRecord:
        """Return the record of an iteration in progress."""
        return self.records.setdefault(iteration, IterationRecord(iteration))

    def report(self, lease: Lease, report: Report) -> None:
        """Record a report under the iteration of the lease's rows."""
        iteration = self.schedule.iteration_of.get(lease.rows[0][1])
        if iteration is not None:
            self.record_of(iteration).reports.append(report)

    def states_before(self, iteration: int) -> dict[str, State]:
        """Return the states at the start of an iteration, which may be the next one."""
        ran = self.record_of(iteration).states
        return {name: dict(ran.get(name, values)) for name, values in self.states.values.items()}

    def _resume_rows(self, rows: StoredRows) -> None:
        """Restore rows of a checkpoint whose groups continue: the output of completed rows is their stage's."""
        (stage,) = self.schedule.generating
        drawn, over = self._drawn_columns(rows), (rows.index["finish_reason"] != FinishReason.ABORT).tolist()
        ended = [uid for uid, is_over in zip(rows.uids(), over, strict=True) if is_over]
        self.table.add(rows.part(ADMISSION, [name for name in rows.columns if name not in drawn]))
        self.table.add(rows.part(DRAWN, drawn))
        if ended:
            self.table.add(rows.part(stage, drawn, ended))
        self._note_lengths(rows.uids(), rows.index)

    def _follow(self, lease: Lease, totals: Mapping[str, float]) -> None:
        name, iteration = lease.task.stage, self.schedule.iteration_of[lease.rows[0][1]]
        self.states.add(name, totals)
        if self.schedule.turn(name) > iteration:
            self.record_of(iteration).states[name] = self.states.advance(name)

    def _note_lengths(self, uids: Sequence[Uid], index: Rows) -> None:
        """Give samplers the lengths of rows as soon as they are known."""
        name = next((name for name in ("length", "prompt_length") if name in index), None)
        if name is not None:
            self.schedule.tokens.update(zip(uids, index[name].tolist(), strict=True))


BORN_WITH = (
    "source",
    "group",
    "sample",
    "prompt",
    "prompt_length",
    "metadata",
    "response",
    "response_mask",
    "ptx_tokens",
)


def writers_before(flow: Flow, stage: Stage) -> list[str]:
    """Return all writers of a row when it is ready for a stage, in list order."""
    waits, found, open_names = waits_for(flow), {ADMISSION}, [stage.name]
    while open_names:
        for name in waits[open_names.pop()]:
            if name not in found:
                found.add(name)
                open_names.append(name)
    return [name for name in (ADMISSION, *(s.name for s in flow.stages)) if name in found]


def unfinished_rows(rows: Rows) -> dict[Uid, UnfinishedRow]:
    """Return the schedule's entries of a checkpoint's continuing rows."""
    ended = (rows["finish_reason"] != FinishReason.ABORT).tolist()
    known = zip(rows.uids(), rows["version"].tolist(), rows["action_tokens"].tolist(), ended, strict=True)
    return {uid: UnfinishedRow(version if drawn else None, is_over) for uid, version, drawn, is_over in known}


def oldest(part: StoredPart) -> dict[Uid, int]:
    """Return the `version` column of a generate stage's output, in any namespace; empty for other stages."""
    name = next(filter(is_version, part.index), None)
    return dict(zip(part.rows, part.index[name].tolist(), strict=True)) if name else {}


def versions_of(rows: Rows) -> list[int]:
    """Return the oldest version that generated each row."""
    versions: list[int] = torch.stack([rows[name] for name in rows.index if is_version(name)]).amin(0).tolist()
    return versions


def is_version(name: str) -> bool:
    """Return True if a column holds the version that generated rows, in any namespace."""
    return name.rsplit(".", 1)[-1] == "version"


class StageStates:
    """The states of stages: the values for each stage's current batch, and the sums over its completed rows."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.values = initial_states(flow)
        self.totals: dict[str, dict[str, float]] = {name: {} for name in self.values}

    def add(self, name: str, totals: Mapping[str, float]) -> None:
        """Add the sums of some rows."""
        known = self.totals[name]
        self.totals[name] = known | {sum_: known.get(sum_, 0.0) + total for sum_, total in totals.items()}

    def advance(self, name: str) -> State:
        """Move a stage to the next batch after all rows are counted; return the values of the previous one."""
        before, totals = self.values[name], self.totals[name]
        self.values[name], self.totals[name] = next_state(self.flow[name], before, totals), {}
        return before

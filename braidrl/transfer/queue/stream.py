"""One flow's rows in the queue: the schedule that decides, the table that holds, and an account of each iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.rows import Rows
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.columns import ADMISSION
from braidrl.flow.readiness import Uid, waits_for
from braidrl.flow.sizes import Sizes
from braidrl.flow.stage_state import State
from braidrl.flow.waves import Selection
from braidrl.transfer.leases import Lease, LeaseLost
from braidrl.transfer.queue.data_plane import Block
from braidrl.transfer.queue.states import StageStates
from braidrl.transfer.queue.table import Detached, StoredPart, Table
from braidrl.transfer.schedule import StreamSchedule

Report = dict[str, Any]
"""What a worker says of a piece of work: metric sums, seconds. The queue hands it on."""


@dataclass(frozen=True)
class FinishedIteration:
    """A published iteration: its rows as recorded after `recorded` stages and with everything, and what happened.

    The payload stays until `places` are dropped from the table.
    """

    iteration: int
    index: Rows
    final: Rows
    payload: list[dict[str, Any]]
    final_payload: list[dict[str, Any]]
    places: Detached
    outcome: Selection
    generated: list[Rows]
    reports: list[Report]
    states: dict[str, State]


@dataclass
class Account:
    """What happened in an iteration so far."""

    outcome: Selection | None = None
    generated: list[Rows] = field(default_factory=list)
    """Index columns of rows that were generated and dropped."""
    reports: list[Report] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    """What stages with a state that are through had as their values."""


class Stream:
    """The rows of one flow."""

    def __init__(self, flow: Flow, sizes: Sizes, during: int | None = None) -> None:
        """`during` is the training iteration that an evaluation's work is shown under."""
        self.during = during
        self.flow, self.schedule, self.table = flow, StreamSchedule(flow, sizes), Table()
        self.readable = {stage.name: writers_before(flow, stage) for stage in flow.stages}
        self.accounts: defaultdict[int, Account] = defaultdict(Account)
        self.states = StageStates(flow)

    @property
    def recorded(self) -> tuple[Stage, ...]:
        """The stages after which a batch is recorded: the sampling segment, or up to the last `generate`."""
        stages = self.flow.stages
        return stages[: max((i + 1 for i, s in enumerate(stages) if s.kind in (Kind.SELECT, Kind.GENERATE)), default=0)]

    @property
    def recorded_writers(self) -> list[str]:
        return [ADMISSION, *(stage.name for stage in self.recorded)]

    def admit(self, index: Rows, block: Block | None, columns: tuple[str, ...]) -> None:
        """Rows are born, with these index columns and a block with these payload columns."""
        uids = index.uids()
        self.schedule.admit(uids)
        self._write(ADMISSION, uids, index, block, columns)

    def restore(self, rows: Rows, block: Block | None) -> None:
        """Puts surplus rows of a checkpoint back as if their stages had written them here."""
        uids = rows.uids()
        checks = next((s.name for s in self.flow.sampling_segment if s.type == "verify"), ADMISSION)
        last: dict[str, str] = {name: ADMISSION if name in BORN_WITH else checks for name in rows}
        for stage in self.flow.sampling_segment:
            last.update(dict.fromkeys((name for name in stage.writes if name in rows), stage.name))
        for writer in dict.fromkeys(last.values()):
            part = rows.only([name for name, chosen in last.items() if chosen == writer])
            self._write(writer, uids, part.index, block, tuple(part.payload))

    def read(self, stage: str, uids: Sequence[Uid]) -> tuple[Rows, list[dict[str, Any]]]:
        """What a stage works on: index columns, and where the payload that it declares lies."""
        wanted = {column.name for column in self.flow.inputs[stage]}
        writers = self.readable[stage]
        return self.table.index(uids, writers), self.table.payload(uids, writers, wanted)

    def acknowledge(
        self, leases: Sequence[int], parts: Sequence[StoredPart], now: float, totals: Mapping[str, float] | None = None
    ) -> list[int]:
        """Work is done and written; the numbers of leases that were lost, whose rows are left out.

        `totals` are the sums of a lease's rows that the stage's state follows.
        """
        versions = {uid: version for part in parts for uid, version in oldest(part).items()}
        lost: list[int] = []
        kept: set[Uid] = set()
        for number in leases:
            try:
                held = self.schedule.leases.held.get(number)
                version = min((versions.get(uid, 0) for uid in held.rows), default=0) if held else None
                lease = self.schedule.acknowledge(number, now, version)
                kept.update(lease.rows)
                if totals:
                    self._follow(lease, totals)
            except LeaseLost:
                lost.append(number)
        for part in parts:
            self._keep(part, kept)
        return lost

    def select(self, number: int, reasons: Mapping[int, str | None], now: float) -> list[int]:
        """A select stage's verdicts by group; the lease's number if it was lost."""
        try:
            self.schedule.select(number, now, dict(reasons))
        except LeaseLost:
            return [number]
        return []

    def close(self) -> list[Block] | None:
        """Ends selection if it is over; blocks that are free now, or None."""
        iteration, groups = self.schedule.opened, {g: list(rows) for g, rows in self.schedule.rows_of.items()}
        outcome = self.schedule.close()
        if outcome is None:
            return None
        account, released = self.accounts[iteration], [uid for g in outcome.released for uid in groups[g]]
        account.outcome = outcome
        # Of groups that nobody waited for only those count that came through the whole segment.
        writers = [s.name for s in self.recorded if s.kind is not Kind.SELECT and s.when.includes(iteration)]
        known = [self.table.parts.get(name, {}) for name in writers]
        whole = [g for g in outcome.released if all(uid in parts for uid in groups[g] for parts in known)]
        generated = [uid for g in whole for uid in groups[g]]
        if generated:
            account.generated.append(self.table.index(generated, self.recorded_writers))
        return self.table.evict(released)

    def publish(self) -> FinishedIteration:
        """The due version is published: the batch leaves."""
        batch = self.schedule.batches[self.schedule.published + 1]
        account = self.accounts.pop(batch.iteration)
        assert account.outcome is not None
        uids = sorted(batch.uids, key=lambda uid: uid[1:])
        every = [ADMISSION, *(stage.name for stage in self.flow.stages)]
        recorded = self.recorded_writers
        finished = FinishedIteration(
            batch.iteration, self.table.index(uids, recorded), self.table.index(uids, every),
            self.table.payload(uids, recorded, None), self.table.payload(uids, every, None),
            self.table.detach(uids), account.outcome, account.generated, account.reports, account.states,
        )  # fmt: skip
        self.schedule.publish()
        return finished

    def report(self, lease: Lease, report: Report) -> None:
        """Notes a report under the iteration that the lease's rows belong to."""
        iteration = self.schedule.iteration_of.get(lease.rows[0][1])
        if iteration is not None:
            self.accounts[iteration].reports.append(report)

    def states_before(self, iteration: int) -> dict[str, State]:
        """The states that an iteration began with, or will begin with if it is the next one."""
        ran = self.accounts[iteration].states
        return {name: dict(ran.get(name, values)) for name, values in self.states.values.items()}

    def _follow(self, lease: Lease, totals: Mapping[str, float]) -> None:
        name, iteration = lease.consumer.stage, self.schedule.iteration_of[lease.rows[0][1]]
        self.states.add(name, totals)
        if self.schedule.turn(name) > iteration:
            self.accounts[iteration].states[name] = self.states.advance(name)

    def _write(
        self, writer: str, uids: Sequence[Uid], index: Rows, block: Block | None, columns: tuple[str, ...]
    ) -> None:
        self.table.add(
            StoredPart(writer, index, block, columns, len(uids), {uid: place for place, uid in enumerate(uids)})
        )

    def _keep(self, part: StoredPart, kept: set[Uid]) -> None:
        part.rows = {uid: place for uid, place in part.rows.items() if uid in kept}
        if part.rows:
            self.table.add(part)


BORN_WITH = ("source", "group", "sample", "prompt", "prompt_length", "metadata", "response", "ptx_tokens")


def writers_before(flow: Flow, stage: Stage) -> list[str]:
    """Everybody who has written a row when it is ready for a stage, in list order."""
    waits, found, open_names = waits_for(flow), {ADMISSION}, [stage.name]
    while open_names:
        for name in waits[open_names.pop()]:
            if name not in found:
                found.add(name)
                open_names.append(name)
    return [name for name in (ADMISSION, *(s.name for s in flow.stages)) if name in found]


def oldest(part: StoredPart) -> dict[Uid, int]:
    """The `version` column of what a generate stage wrote, in whatever namespace; nothing of other stages."""
    name = next((name for name in part.index if name.rsplit(".", 1)[-1] == "version"), None)
    return dict(zip(part.rows, part.index[name].tolist(), strict=True)) if name else {}

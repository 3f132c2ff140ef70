"""What every worker of the streaming runtime has at hand: its queue, its executor, its trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from braidrl.config import StreamingConfig
from braidrl.flow import Flow, Stage
from braidrl.flow.readiness import Uid
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.trace import Span, State, TraceWriter
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.streaming.groups import Group
from braidrl.transfer.queue.data_plane import DataPlane

WAITING_WORTH_S = 1e-3
"""Shorter pauses are not worth a line in the trace."""


class LeaseProgress(Progress):
    """Reports progress to nobody's screen, but to whoever has to know that this worker is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.on_advance: Callable[[], object] = lambda: None

    def advanced(self) -> None:
        """Somewhere in this process work has gone on."""
        self.on_advance()

    @contextmanager
    def stage(self, name: str, total_rows: int | None = None) -> Iterator[Bar]:
        yield Bar(name, total_rows, time.monotonic(), self.advanced)


@dataclass
class Report:
    """What a worker says of its work: seconds, and sums for the iteration's metrics."""

    stage: str
    seconds: float = 0.0
    sums: Sums = field(default_factory=Sums)

    def plain(self) -> dict[str, Any]:
        """As it travels."""
        return {"stage": self.stage, "seconds": self.seconds, "sums": self.sums.pairs()}


@dataclass
class BusySpan:
    """A stretch of a worker's time; `reported` is up to when it has been told of."""

    stage: str
    iteration: int
    version: int | None
    start: float
    reported: float
    rows: int = 0


@dataclass
class WorkerContext:
    """Of one process of a group."""

    name: str
    group: Group
    settings: StreamingConfig
    flow: Flow
    evaluation: Flow
    executor: StageExecutor
    data: DataPlane
    progress: LeaseProgress
    trace: TraceWriter
    idle_since: float | None = None

    def stage(self, name: str) -> Stage:
        """A stage of the flow, or of the evaluation's."""
        return next(stage for stage in (*self.flow.stages, *self.evaluation.stages) if stage.name == name)

    @contextmanager
    def busy(
        self, stage: str, iteration: int, uids: Sequence[Uid] = (), version: int | None = None
    ) -> Iterator[Report]:
        """Records the time that a piece of work on some rows takes; yields the report on it, whose sums are to be filled.

        What is raised inside says of which stage and rows.
        """
        piece, report = self.begin(stage, iteration, version), Report(stage)
        try:
            yield report
        except Exception as error:
            error.add_note(f"in {self.name}, stage {stage}, iteration {iteration}, rows {shortened(uids)}")
            raise
        finally:
            piece.rows, report.seconds = len(uids), self.trace.now() - piece.start
            self.end(piece)

    def begin(self, stage: str, iteration: int, version: int | None = None) -> BusySpan:
        """A piece of work begins, and with it the waiting before it has ended."""
        now = self.trace.now()
        if stage and self.idle_since is not None and now - self.idle_since > WAITING_WORTH_S:
            self._record(BusySpan(stage, iteration, version, self.idle_since, self.idle_since), now, "waiting")
        return BusySpan(stage, iteration, version, now, now)

    def count(self, piece: BusySpan, stage: str, rows: int) -> Report:
        """A report on rows that are done while the piece goes on, with the seconds since the last such report."""
        piece.rows += rows
        before, piece.reported = piece.reported, self.trace.now()
        return Report(stage, piece.reported - before)

    def end(self, piece: BusySpan) -> None:
        """A piece of work is over; waiting begins."""
        self.idle_since = self.trace.now()
        self._record(piece, self.idle_since, "busy")

    def _record(self, piece: BusySpan, end: float, state: State) -> None:
        self.trace.record(
            Span(
                self.name, self.group.role or self.group.name, piece.stage, piece.iteration, piece.start, end,
                rows=piece.rows, version=piece.version, state=state,
            )
        )  # fmt: skip


def shortened(uids: Sequence[Uid], most: int = 8) -> str:
    """The first few uids, and how many more there are."""
    more = f" and {len(uids) - most} more" if len(uids) > most else ""
    return ", ".join(map(str, uids[:most])) + more if uids else "none"

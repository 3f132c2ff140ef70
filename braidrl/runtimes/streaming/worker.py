"""What every worker of the streaming runtime has at hand, and the loop of the simplest: one that computes.

take ──▶ rows ──executor──▶ columns ──▶ written and acknowledged, with a report of seconds and metric sums
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from braidrl.config import StreamingConfig
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.compute import dropped, summed, with_state
from braidrl.flow.readiness import Uid
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.observe.trace import Span, State, TraceWriter
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.streaming.groups import Group
from braidrl.transfer.queue.client import Client, StreamLoader, WorkItem
from braidrl.transfer.queue.storage import DataPlane, Evicted

WAITING_WORTH_S = 1e-3
"""Shorter pauses are not worth a line in the trace."""


class LeaseProgress(Progress):
    """Reports progress to whoever has to know that this worker is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.on_advance: Callable[[], object] = lambda: None

    def advanced(self) -> None:
        """Note that somewhere in this process work has gone on."""
        self.on_advance()

    @contextmanager
    def stage(self, name: str, total_rows: int | None = None) -> Iterator[Bar]:
        """Show a bar to nobody."""
        yield Bar(name, total_rows, time.monotonic(), self.advanced)


@dataclass
class BusySpan:
    """A stretch of a worker's time and what it says of it: seconds, and sums for the iteration's metrics."""

    stage: str
    iteration: int
    version: int | None
    start: float
    reported: float
    """Up to when it has been told of."""
    rows: int = 0
    seconds: float = 0.0
    sums: Sums = field(default_factory=Sums)

    def report(self) -> dict[str, Any]:
        """Return the report as it travels."""
        return {"stage": self.stage, "seconds": self.seconds, "sums": self.sums.pairs()}


@dataclass
class WorkerContext:
    """What one process of a group works with."""

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
        """Return a stage of the flow, or of the evaluation's."""
        return next(stage for stage in (*self.flow.stages, *self.evaluation.stages) if stage.name == name)

    @contextmanager
    def busy(
        self, stage: str, iteration: int, uids: Sequence[Uid] = (), version: int | None = None
    ) -> Iterator[BusySpan]:
        """Record the time that a piece of work takes; yields the span, whose sums are to be filled.

        What is raised inside says of which stage and rows.
        """
        span = self.begin(stage, iteration, version)
        try:
            yield span
        except Exception as error:
            error.add_note(f"in {self.name}, stage {stage}, iteration {iteration}, rows {shortened(uids)}")
            raise
        finally:
            span.rows, span.seconds = len(uids), self.trace.now() - span.start
            self.end(span)

    def begin(self, stage: str, iteration: int, version: int | None = None) -> BusySpan:
        """Begin a piece of work; with it the waiting before it has ended."""
        now = self.trace.now()
        if stage and self.idle_since is not None and now - self.idle_since > WAITING_WORTH_S:
            self._record(BusySpan(stage, iteration, version, self.idle_since, self.idle_since), now, "waiting")
        return BusySpan(stage, iteration, version, now, now)

    def count(self, span: BusySpan, stage: str, rows: int) -> dict[str, Any]:
        """Return a report on rows that are done while the span goes on, with the seconds since the last such report."""
        span.rows += rows
        before, span.reported = span.reported, self.trace.now()
        return {"stage": stage, "seconds": span.reported - before, "sums": []}

    def end(self, span: BusySpan) -> None:
        """End a span of work; waiting begins."""
        self.idle_since = self.trace.now()
        self._record(span, self.idle_since, "busy")

    def _record(self, span: BusySpan, end: float, state: State) -> None:
        self.trace.record(
            Span(
                self.name, self.group.role or self.group.name, span.stage, span.iteration, span.start, end,
                rows=span.rows, version=span.version, state=state,
            )
        )  # fmt: skip


def shortened(uids: Sequence[Uid], most: int = 8) -> str:
    """Return the first few uids, and how many more there are."""
    more = f" and {len(uids) - most} more" if len(uids) > most else ""
    return ", ".join(map(str, uids[:most])) + more if uids else "none"


def compute(context: WorkerContext, client: Client) -> None:
    """Run the loop of a compute worker: verifiers, registered functions, selection."""
    settings = context.settings
    context.progress.on_advance = lambda: client.renew(settings.lease_s / 3)
    for work in StreamLoader(client, context.group.stages, settings.dispatch_rows, settings.wait_s):
        if work.kind == "rows":
            # Rows of a group that selection has dropped meanwhile are gone, and the lease with them.
            with suppress(Evicted):
                compute_rows(context, client, work)


def compute_rows(context: WorkerContext, client: Client, work: WorkItem) -> None:
    """Do one lease: columns for its rows, or verdicts on its groups."""
    stage = with_state(context.stage(work.stage), work.message["state"])
    leases = [number for number, _ in work.leases]
    if stage.kind is Kind.SELECT:
        with context.busy(stage.name, work.iteration, work.index.uids()) as span:
            gone = dropped(stage, work.index)
            reasons = {group: gone.get(group) for group in dict.fromkeys(work.index["group"].tolist())}
        client.selected(stage.name, leases[0], reasons, span.report())
        return
    with context.busy(stage.name, work.iteration, work.index.uids()) as span:
        rows = work.rows()
        columns = context.executor.run(stage, rows, span.sums)
        written = client.write(rows.uids(), columns)
        followed = summed(stage, rows) if stage.state else {}
    totals = {name: float(total) for name, total in followed.items()}
    client.done(stage.name, leases, [written], span.report(), totals)

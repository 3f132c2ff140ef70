"""The trace: each process appends spans of its work to its own file; the reader merges them.

run/trace/actor-0.jsonl    one line per span, written when the span ends
run/trace/actor-1.jsonl

Times are wall-clock seconds, because spans of several processes (and machines with synchronized clocks) are compared. Within
a process they advance by its monotonic clock, so a corrected wall clock gives no negative span. The reader shifts the earliest
start to zero.
"""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from braidrl.errors import UserError
from braidrl.observe.metrics import Sums, append_line, open_lines, read_lines

BusyState = Literal["busy", "waiting"]
WAITING_WORTH_S = 1e-3
"""Shorter pauses of a worker are not recorded."""
MOST_UIDS = 8
"""Rows that an error names."""


@dataclass
class Span:
    """A part of one worker's time, `start` to `end` in seconds, spent on a stage or waiting for its input.

    Counts of an open span are set before it ends.
    """

    worker: str
    role: str
    stage: str
    iteration: int
    start: float
    end: float
    rows: int = 0
    tokens: int = 0
    version: int | None = None
    state: BusyState = "busy"

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TraceWriter:
    """Appends one worker's spans to `run`/trace/<worker>.jsonl. Thread-safe."""

    def __init__(self, run: Path, worker: str) -> None:
        self.worker = worker
        self._file = open_lines(run / "trace" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', worker)}.jsonl")
        self._lock = threading.Lock()
        self._origin = time.time() - time.perf_counter()

    def now(self) -> float:
        """Return wall-clock seconds that never run backwards in this process."""
        return self._origin + time.perf_counter()

    @contextmanager
    def span(
        self, role: str, stage: str, iteration: int, *, rows: int = 0, tokens: int = 0, version: int | None = None,
        state: BusyState = "busy",
    ) -> Iterator[Span]:  # fmt: skip
        """Record the time of the block, also when it raises; the block may set counts on the yielded span."""
        start = self.now()
        span = Span(self.worker, role, stage, iteration, start, start, rows, tokens, version, state)
        try:
            yield span
        finally:
            span.end = self.now()
            self.record(span)

    def record(self, span: Span) -> None:
        """Append a span."""
        with self._lock:
            append_line(self._file, {one.name: getattr(span, one.name) for one in fields(Span)})

    def close(self) -> None:
        with self._lock:
            self._file.close()


@dataclass
class BusySpan(Span):
    """A span with sums for the iteration's metrics; `end` is the end of the time already reported."""

    sums: Sums = field(default_factory=Sums)

    def report(self) -> dict[str, Any]:
        """Return the report in its wire form."""
        return {"stage": self.stage, "seconds": self.seconds, "sums": self.sums.pairs()}


class WorkerTrace(TraceWriter):
    """The trace of a streaming worker, which waits when it has no work. Pieces of work may overlap."""

    def __init__(self, run: Path, worker: str, role: str) -> None:
        """Start without work; `role` labels the worker's spans."""
        super().__init__(run, worker)
        self._role = role
        self._idle_since: float | None = None
        self._under_way = 0

    @contextmanager
    def busy(
        self, stage: str, iteration: int, uids: Sequence[Any] = (), version: int | None = None
    ) -> Iterator[BusySpan]:
        """Record the time of a piece of work; the caller fills the sums of the yielded span.

        An error raised inside is extended by the stage and its rows.
        """
        span = self.begin(stage, iteration, version)
        try:
            yield span
        except Exception as error:
            rows = ", ".join(map(str, uids[:MOST_UIDS])) or "none"
            more = f" and {len(uids) - MOST_UIDS} more" if len(uids) > MOST_UIDS else ""
            error.add_note(f"in {self.worker}, stage {stage}, iteration {iteration}, rows {rows}{more}")
            raise
        finally:
            span.rows = len(uids)
            self.end(span)

    def begin(self, stage: str, iteration: int, version: int | None = None) -> BusySpan:
        """Start a piece of work; this ends the waiting before it."""
        now, idle = self.now(), self._idle_since
        if idle is not None and now - idle > WAITING_WORTH_S:
            about = (self.worker, self._role, stage, iteration)
            self.record(Span(*about, idle, now, version=version, state="waiting"))
        self._idle_since = None
        self._under_way += 1
        return BusySpan(self.worker, self._role, stage, iteration, now, now, version=version)

    def count(self, span: BusySpan, stage: str, rows: int, tokens: int) -> dict[str, Any]:
        """Report rows of a queue's stage, with their tokens, while the span continues, with the seconds since its last report."""
        span.rows += rows
        span.tokens += tokens
        before, span.end = span.end, self.now()
        return {"stage": stage, "seconds": span.end - before, "sums": []}

    def end(self, span: BusySpan) -> None:
        """End a piece of work; if no other is open, waiting starts."""
        span.end = self.now()
        self._under_way -= 1
        self._idle_since = None if self._under_way else span.end
        self.record(span)


def traced(
    trace: TraceWriter | None, role: str, stage: str, iteration: int, **about: Any
) -> AbstractContextManager[Span]:
    """Record a span as `TraceWriter.span` does; without a trace do nothing."""
    return trace.span(role, stage, iteration, **about) if trace else nullcontext(Span("", role, stage, iteration, 0, 0))


def read_trace(run: Path) -> list[Span]:
    """Read the spans of all workers, sorted by start, relative to the earliest. Raises UserError if the run has none."""
    spans = [Span(**line) for path in sorted((run / "trace").glob("*.jsonl")) for line in read_lines(path)]
    if not spans:
        raise UserError(f"{run} has no trace: is it the folder of a run that has done a step?")
    origin = min(span.start for span in spans)
    moved = (replace(span, start=span.start - origin, end=span.end - origin) for span in spans)
    return sorted(moved, key=lambda span: (span.start, span.worker))

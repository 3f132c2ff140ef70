"""The trace: each process appends spans of its work to a separate file; the reader merges them, and `braid timeline`
sums them.

run/trace/actor-0.jsonl   one line per span, written when the span ends
run/trace/actor-1.jsonl  ─read_trace──▶ spans
    ──▶ table of busy and waiting times; run/timeline.json (Chrome trace) for Perfetto

Times are wall-clock seconds, because spans of several processes (and machines with synchronized clocks) are compared.
Within a process they advance by its monotonic clock, so a corrected wall clock gives no negative span. The reader
shifts the earliest start to zero.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from braidrl.errors import UserError
from braidrl.observe.metrics import Sums, append_line, open_lines, read_lines

BusyState = Literal["busy", "waiting"]
WAITING_WORTH_S = 1e-3
"""Shorter pauses of a worker are not recorded."""
MOST_UIDS = 8
"""Rows that an error names."""
LONGEST_GAP = 60.0
"""A longer time without any span means that the run was stopped and resumed."""
CLOCK_ROUNDING = 1e-6
"""A double of seconds since 1970 is exact to less than a microsecond: a smaller overlap is none."""
ALL_STAGES = "all"


@dataclass
class Span:
    """A part of one worker's time, `start` to `end` in seconds, on a stage or waiting for its input; counts may be set
    until it ends.
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
        """Return wall-clock seconds that never decrease in this process."""
        return self._origin + time.perf_counter()

    @contextmanager
    def span(
        self,
        role: str,
        stage: str,
        iteration: int,
        *,
        rows: int = 0,
        tokens: int = 0,
        version: int | None = None,
        state: BusyState = "busy",
    ) -> Iterator[Span]:
        """Record the time of the block, even if it raises; the block may set counts on the yielded span."""
        start = self.now()
        span = Span(self.worker, role, stage, iteration, start, start, rows, tokens, version, state)
        try:
            yield span
        finally:
            span.end = self.now()
            self.record(span)

    def record(self, span: Span) -> None:
        with self._lock:
            append_line(self._file, {field_of.name: getattr(span, field_of.name) for field_of in fields(Span)})

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
        """Record the time of a piece of work; the caller fills the span's sums.

        The stage and its rows are added to an error.
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
        """Start a piece of work; this ends the preceding wait."""
        now, idle = self.now(), self._idle_since
        if idle is not None and now - idle > WAITING_WORTH_S:
            about = (self.worker, self._role, stage, iteration)
            self.record(Span(*about, idle, now, version=version, state="waiting"))
        self._idle_since = None
        self._under_way += 1
        return BusySpan(self.worker, self._role, stage, iteration, now, now, version=version)

    def count(self, span: BusySpan, stage: str, rows: int, tokens: int) -> dict[str, Any]:
        """Report rows of a queue's stage, with their tokens, while the span lasts, with the seconds since the last."""
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
    """Record a span as `TraceWriter.span` does; do nothing without a trace."""
    return trace.span(role, stage, iteration, **about) if trace else nullcontext(Span("", role, stage, iteration, 0, 0))


def span_of(record: dict[str, Any]) -> Span:
    """Return the span of a line. Raises ValueError for a line that is none."""
    try:
        return msgspec.convert(record, Span)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a span ({error})") from None


def read_trace(run: Path) -> list[Span]:
    """Read the spans of all workers, sorted by start, relative to the earliest.

    Raises UserError if the run has none.
    """
    spans = [span for path in sorted((run / "trace").glob("*.jsonl")) for span in read_lines(path, span_of)]
    if not spans:
        raise UserError(f"{run} has no trace: is it the folder of a run that has done a step?")
    origin = min(span.start for span in spans)
    moved = (replace(span, start=span.start - origin, end=span.end - origin) for span in spans)
    return sorted(moved, key=lambda span: (span.start, span.worker))


@dataclass(frozen=True)
class Busy:
    """Time of one role on one stage (or all stages), summed over its workers.

    Shares are of the workers' time in the run.
    """

    role: str
    stage: str
    workers: int
    rows: int
    tokens: int
    busy_seconds: float
    waiting_seconds: float
    busy_share: float
    waiting_share: float


def busy_table(spans: Sequence[Span]) -> list[Busy]:
    """Return a line per role over all stages, and one per role and stage, in order of their first start.

    A worker's time lasts from the run's first start to its last end, minus long pauses. Overlapping spans of a role
    count once.
    """
    available = covered(spans, LONGEST_GAP)
    table = []
    for role in dict.fromkeys(span.role for span in spans):
        of_role = [span for span in spans if span.role == role]
        for stage in (ALL_STAGES, *dict.fromkeys(span.stage for span in of_role)):
            stage_spans = of_role if stage == ALL_STAGES else [span for span in of_role if span.stage == stage]
            workers = dict.fromkeys(span.worker for span in stage_spans)
            busy, waiting = (
                sum(covered([s for s in stage_spans if (s.worker, s.state) == (worker, state)]) for worker in workers)
                for state in ("busy", "waiting")
            )
            capacity = available * len(workers) or 1.0
            done = [span for span in stage_spans if span.state == "busy"]
            rows, tokens = sum(span.rows for span in done), sum(span.tokens for span in done)
            table.append(
                Busy(role, stage, len(workers), rows, tokens, busy, waiting, busy / capacity, waiting / capacity)
            )
    return table


def covered(spans: Iterable[Span], gap: float = 0.0) -> float:
    """Return the seconds covered by at least one span; gaps of up to `gap` seconds count as covered."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        begin = end if span.start - end <= gap else span.start
        total += max(0.0, span.end - max(begin, end))
        end = max(end, span.end)
    return total


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the spans in the Chrome trace event format (complete events, in microseconds), for chrome://tracing and
    Perfetto.

    A worker is a process of the format, and the spans of a thread do not overlap: a worker with parallel work has
    several.
    """
    # In this order `actor/10` comes after `actor/9`.
    digits = re.compile(r"(\d+)")
    workers = {
        span.worker: [(int(part), "") if part.isdigit() else (-1, part) for part in digits.split(span.worker)]
        for span in spans
    }
    events, thread_ids = list[dict[str, Any]](), itertools.count(1)
    for number, worker in enumerate(sorted(workers, key=workers.__getitem__), start=1):
        for name, about in (("process_name", {"name": worker}), ("process_sort_index", {"sort_index": number})):
            events.append({"ph": "M", "name": name, "pid": number, "args": about})
        ends: dict[int, float] = {}
        for span in sorted((s for s in spans if s.worker == worker), key=lambda s: (s.start, s.end)):
            free = (thread for thread, end in ends.items() if end <= span.start + CLOCK_ROUNDING)
            thread = next(free, None) or next(thread_ids)
            ends[thread] = span.end
            events.append(
                {
                    "ph": "X",
                    "name": span.stage if span.state == "busy" else f"waiting for {span.stage}",
                    "pid": number,
                    "tid": thread,
                    "cat": f"{span.role},{span.state}",
                    "ts": span.start * 1e6,
                    "dur": span.seconds * 1e6,
                    "args": {name: getattr(span, name) for name in ("iteration", "rows", "tokens", "version")},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline(run: Path) -> Iterator[str]:
    """Write `run`/timeline.json; yield the lines of the table of busy and waiting times, and the path.

    Raises UserError without a trace.
    """
    spans = read_trace(run)
    heads = f"{'workers':>8}{'rows':>10}{'tokens':>13}{'busy s':>10}{'waiting s':>11}{'busy':>7}{'waiting':>9}"
    yield f"{'role':<14}{'stage':<34}{heads}"
    for row in busy_table(spans):
        done = f"{row.workers:>8}{row.rows:>10,}{row.tokens:>13,}{row.busy_seconds:>10.2f}{row.waiting_seconds:>11.2f}"
        yield f"{row.role:<14}{row.stage:<34}{done}{row.busy_share:>7.0%}{row.waiting_share:>9.0%}"
    path = run / "timeline.json"
    path.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    yield f"{path}: open it at ui.perfetto.dev"

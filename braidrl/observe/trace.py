"""The trace: each process appends spans of its work to a file of its own, and reading merges them.

run/trace/actor-0.jsonl    one line per span, written when the span ends
run/trace/actor-1.jsonl

Times are seconds of the wall clock, because spans of several processes (and machines whose clocks agree) are compared; within a
process they advance by its monotonic clock, so that a corrected wall clock makes no span negative. Reading makes the earliest
start of the run zero.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from braidrl.errors import UserError
from braidrl.observe.lines import LineFile, read_lines

State = Literal["busy", "waiting"]


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time, `start` to `end` in seconds, spent on a stage or waiting for its input."""

    worker: str
    role: str
    stage: str
    iteration: int
    start: float
    end: float
    rows: int = 0
    tokens: int = 0
    version: int | None = None
    state: State = "busy"

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Done:
    """The counts of an open span, to be set before it ends."""

    rows: int = 0
    tokens: int = 0
    version: int | None = None


class TraceWriter:
    """Appends one worker's spans to `run`/trace/<worker>.jsonl; may be used from several threads."""

    def __init__(self, run: Path, worker: str) -> None:
        self.worker = worker
        self._lines = LineFile(run / "trace" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', worker)}.jsonl")
        self._lock = threading.Lock()
        self._origin = time.time() - time.perf_counter()

    def now(self) -> float:
        """Return wall-clock seconds that never run backwards in this process."""
        return self._origin + time.perf_counter()

    @contextmanager
    def span(
        self, role: str, stage: str, iteration: int, *, rows: int = 0, tokens: int = 0, version: int | None = None,
        state: State = "busy",
    ) -> Iterator[Done]:  # fmt: skip
        """Record the time that the block takes, also when it raises; the block may set counts on the yielded object."""
        done = Done(rows, tokens, version)
        start = self.now()
        try:
            yield done
        finally:
            counts = asdict(done)
            self.record(Span(self.worker, role, stage, iteration, start, self.now(), **counts, state=state))

    def past(self, role: str, stage: str, iteration: int, seconds: float) -> None:
        """Record what has taken so many seconds until now."""
        end = self.now()
        self.record(Span(self.worker, role, stage, iteration, end - seconds, end))

    def record(self, span: Span) -> None:
        """Append a span that was measured elsewhere."""
        with self._lock:
            self._lines.append(asdict(span))

    def close(self) -> None:
        with self._lock:
            self._lines.close()


def traced(
    trace: TraceWriter | None, role: str, stage: str, iteration: int, **about: Any
) -> AbstractContextManager[Done]:
    """Do as `TraceWriter.span`; without a trace nothing is recorded."""
    return trace.span(role, stage, iteration, **about) if trace else nullcontext(Done())


def read_trace(run: Path) -> list[Span]:
    """Read the spans of all workers by start, counted from the earliest. Raises UserError where the run has none."""
    spans = [Span(**line) for path in sorted((run / "trace").glob("*.jsonl")) for line in read_lines(path)]
    if not spans:
        raise UserError(f"{run} has no trace: is it the folder of a run that has done a step?")
    origin = min(span.start for span in spans)
    moved = (replace(span, start=span.start - origin, end=span.end - origin) for span in spans)
    return sorted(moved, key=lambda span: (span.start, span.worker))

"""`braid timeline`: the trace as a table of busy and waiting times, and as a Chrome trace for Perfetto."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidrl.observe.chart import TEMPLATES, Tile
from braidrl.observe.progress import spell_seconds
from braidrl.observe.trace import Span, read_trace

# A longer time without any span means that the run was stopped and resumed.
LONGEST_GAP = 60.0
# A double of seconds since 1970 is exact to less than a microsecond: a smaller overlap is none.
CLOCK_ROUNDING = 1e-6
ALL_STAGES = "all"


@dataclass(frozen=True)
class Busy:
    """Time of one role on one stage (or all stages), summed over its workers. Shares are of the workers' time in the run."""

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

    A worker's time in the run lasts from the run's first start to its last end, less pauses of more than a minute. Spans of
    one role that overlap in one worker count once in the role's line.
    """
    available = covered(spans, LONGEST_GAP)
    table = []
    for role in dict.fromkeys(span.role for span in spans):
        of_role = [span for span in spans if span.role == role]
        for stage in (ALL_STAGES, *dict.fromkeys(span.stage for span in of_role)):
            own = of_role if stage == ALL_STAGES else [span for span in of_role if span.stage == stage]
            workers = dict.fromkeys(span.worker for span in own)
            busy, waiting = (
                sum(covered([s for s in own if (s.worker, s.state) == (worker, state)]) for worker in workers)
                for state in ("busy", "waiting")
            )
            whole = available * len(workers) or 1.0
            done = [span for span in own if span.state == "busy"]
            rows, tokens = sum(span.rows for span in done), sum(span.tokens for span in done)
            table.append(Busy(role, stage, len(workers), rows, tokens, busy, waiting, busy / whole, waiting / whole))
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
    """Return the spans in the Chrome trace event format (complete events, in microseconds), for chrome://tracing and Perfetto.

    A worker is a process of the format, and the spans of a thread do not overlap: a worker with parallel work has several.
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
                    "ph": "X", "name": span.stage if span.state == "busy" else f"waiting for {span.stage}",
                    "pid": number, "tid": thread, "cat": f"{span.role},{span.state}",
                    "ts": span.start * 1e6, "dur": span.seconds * 1e6,
                    "args": {name: getattr(span, name) for name in ("iteration", "rows", "tokens", "version")},
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_timeline(run: Path) -> tuple[Path, Path, list[str]]:
    """Write `run`/timeline.html and `run`/timeline.json (Chrome trace); return both paths, and the table as text for a terminal.

    Raises UserError if the run has no trace.
    """
    spans = read_trace(run)
    page, chrome = run / "timeline.html", run / "timeline.json"
    page.write_text(timeline_page(run.resolve().name, spans), encoding="utf-8")
    chrome.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    lines = [f"{'role':<14}{'stage':<34}{'workers':>8}{'rows':>10}{'busy s':>10}{'waiting s':>11}{'busy':>7}"]
    for line in busy_table(spans):
        lines.append(
            f"{line.role:<14}{line.stage:<34}{line.workers:>8}{line.rows:>10,}{line.busy_seconds:>10.2f}"
            f"{line.waiting_seconds:>11.2f}{line.busy_share:>7.0%}"
        )
    return page, chrome, lines


def timeline_page(name: str, spans: Sequence[Span]) -> str:
    """Return the page with headline numbers and the table."""
    table = busy_table(spans)
    whole = [line for line in table if line.stage == ALL_STAGES]
    tiles = [
        Tile("Time in the run", spell_seconds(covered(spans, LONGEST_GAP))),
        Tile("Iterations", f"{len({span.iteration for span in spans}):,}"),
        Tile("Workers", f"{len({span.worker for span in spans}):,}"),
        *(Tile(f"{line.role} busy", f"{line.busy_share:.0%}", f"waiting {line.waiting_share:.0%}") for line in whole),
    ]
    template = TEMPLATES.get_template("timeline.html")
    return template.render(kind="timeline", name=name, tiles=tiles, table=table, all_stages=ALL_STAGES)

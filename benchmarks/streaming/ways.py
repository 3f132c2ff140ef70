"""Time the four weight-update policies against generating and training in turn, on real workers whose work takes a
given time.

    python -m benchmarks.streaming.ways [--unit SECONDS] [--rows ROWS] [NAME ...]

8 engines of 32 slots and 4 trainers. Responses are log-normal: the median takes one unit, the longest of a batch ten
units. Training a batch takes as long as generating it with all slots full; `dapo` generates two groups for each group
that it keeps. The simulator gets the same numbers, and its prediction is printed beside the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.streaming import sleeping as work
from braidrl.config import parse_config
from braidrl.data.rows import Uid
from braidrl.flow import Flow
from braidrl.flow.batches import Sizes
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import Span, read_trace
from braidrl.plan.simulation import Streaming, Workload
from braidrl.runtimes.run import TrainingRun
from braidrl.weights.versions import Way
from tests.plan.durations import long_tailed
from tests.tiny import sums, write_jsonl, write_model

ENGINES, SLOTS, TRAINERS, SAMPLES = 8, 32, 4, 4
MEDIAN = 16
"""Tokens of the median response."""
LONGEST = 10 * MEDIAN
LOAD_UNITS = 0.1
"""Duration of a weight load, in units."""
FILE = Path(work.__file__)


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    name: str
    weights: Way
    staleness: int
    in_turn: bool = False
    selects: bool = False
    iterations: int = 5
    filling: int = 2
    """Iterations in which the pipeline fills."""


KINDS = [
    Kind("synchronous", "end", 0, in_turn=True, iterations=3, filling=1),
    Kind("one-step", "delayed", 1),
    Kind("half-step", "rolling", 1),
    Kind("interrupt", "interrupt", 1),
    Kind("dapo synchronous", "end", 0, in_turn=True, selects=True, iterations=3, filling=1),
    Kind("dapo half-step", "rolling", 1, selects=True),
    Kind("dapo interrupt", "interrupt", 1, selects=True),
]


@dataclass(frozen=True)
class Scale:
    """The amount of work: `unit` seconds for a response of median length."""

    unit: float
    rows: int

    @property
    def token_s(self) -> float:
        """Seconds per token in a slot."""
        return self.unit / MEDIAN

    def training_token_s(self, kind: Kind) -> float:
        """Return the seconds per token on one trainer: a batch, dropped rows included, takes as long as generation on
        all slots.
        """
        return self.token_s * TRAINERS / (ENGINES * SLOTS) * (2 if kind.selects else 1)


def settings(kind: Kind, scale: Scale, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    engine = {
        "token_s": scale.token_s,
        "load_s": LOAD_UNITS * scale.unit,
        "median": MEDIAN,
        "longest": LONGEST,
        "among": scale.rows,
    }
    return {
        "flow": f"{FILE}:sleeping",
        "algorithm": {"token_s": scale.training_token_s(kind), "in_turn": kind.in_turn, "selects": kind.selects},
        "model": str(folder / "model"),
        "output": str(folder),
        "name": kind.name,
        "threads": 1,
        "device": "cpu",
        "data": {"train": str(folder / "train.jsonl")},
        "runtime": "streaming",
        "rollout": {
            "engine": f"{FILE}:SleepingEngine",
            "engine_settings": engine,
            "slots": SLOTS,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": LONGEST,
            "max_log_prob_gap": 1e3,
        },
        "trainer": {
            "steps": kind.iterations,
            "prompts_per_step": scale.rows // SAMPLES,
            "max_staleness": kind.staleness,
            "checkpoint_every": 0,
            "max_tokens_per_device": 1024,
        },
        "streaming": {
            "workers": {"actor.generate": ENGINES, "actor": TRAINERS},
            "weights": kind.weights,
            "dispatch_rows": 32,
        },
        "evaluation": {"every": 0},
        "trackers": [],
    }


def workload(kind: Kind, scale: Scale, flow: Flow) -> Workload:
    """Return the workload for the simulator."""
    length = long_tailed(0, MEDIAN, LONGEST, scale.rows)

    of_token = {"actor.generate": scale.token_s, "actor.update": scale.training_token_s(kind)}

    def seconds(stage: str, uid: Uid) -> float:
        return round(length(uid)) * of_token.get(stage, 0.0)

    def verdict(group: int) -> str | None:
        return None if not kind.selects or work.is_kept(group) else "the other half"

    return Workload(
        flow,
        Sizes(kind.iterations, scale.rows // SAMPLES, SAMPLES, scale.rows, max_staleness=kind.staleness),
        seconds,
        workers={"actor.generate": ENGINES, "actor.update": TRAINERS},
        slots=SLOTS,
        step_seconds=scale.token_s,
        dispatch_rows=32 * TRAINERS,
        loading=kind.weights,
        load_seconds=LOAD_UNITS * scale.unit,
        verdict=verdict,
    )


def busy_seconds(spans: Iterable[Span], start: float, end: float) -> float:
    """Return how long some of these spans were running between two moments."""
    busy, at = 0.0, start
    for first, last in sorted((span.start, span.end) for span in spans):
        first, last = max(first, at), min(last, end)
        if last > first:
            busy, at = busy + last - first, last
    return busy


def steady(kind: Kind, ends: Sequence[float], spans: Sequence[Span]) -> dict[str, float]:
    """Return an iteration's duration, without the iterations in which the pipeline fills or empties.

    `idle` is the share of the time in which an engine has no row; `training` is the time in which trainers work, in
    seconds.
    """
    start, end, iterations = ends[kind.filling - 1], ends[-2], len(ends) - 1 - kind.filling
    work = [span for span in spans if getattr(span, "state", "busy") == "busy"]
    of_engine = defaultdict(list)
    for span in work:
        if span.stage == "actor.generate":
            of_engine[span.worker].append(span)
    busy = sum(busy_seconds(own, start, end) for own in of_engine.values())
    return {
        "seconds": (end - start) / iterations,
        "idle": 1 - busy / (ENGINES * (end - start)),
        "training": busy_seconds((span for span in work if span.stage == "actor.update"), start, end) / iterations,
    }


def measured(kind: Kind, scale: Scale) -> dict[str, float]:
    """Return the measurements of a run."""
    with tempfile.TemporaryDirectory(prefix="braid-ways-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_jsonl(folder / "train.jsonl", sums(64))
        with TrainingRun(parse_config(settings(kind, scale, folder))) as run:
            run.train()
        spans = read_trace(run.folder)
        stale = max(line["staleness/max"] for line in read_metrics(run.folder))
    assert stale <= kind.staleness
    trained = [span for span in spans if span.stage == "actor.update" and span.state == "busy"]
    ends = [max(s.end for s in trained if s.iteration == k) for k in range(1, kind.iterations + 1)]
    return steady(kind, ends, spans)


def predicted(kind: Kind, scale: Scale) -> dict[str, float]:
    """Return the simulator's prediction."""
    flow = work.sleeping(work.SleepingParameters(in_turn=kind.in_turn, selects=kind.selects))
    result = Streaming(workload(kind, scale, flow)).simulate()
    return steady(kind, result.ends, result.spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument("--unit", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--predict", action="store_true", help="simulate only")
    arguments = parser.parse_args()
    scale = Scale(arguments.unit, arguments.rows)
    path = Path("benchmarks/results/streaming_ways.json")
    lines = {line["name"]: line for line in json.loads(path.read_text())["lines"]} if path.is_file() else {}
    for kind in KINDS:
        if arguments.names and kind.name not in arguments.names:
            continue
        line: dict[str, Any] = {"name": kind.name, "predicted": predicted(kind, scale)}
        if not arguments.predict:
            line |= {"measured": measured(kind, scale), "unit": scale.unit, "rows": scale.rows}
            line["load"] = os.getloadavg()
            lines[kind.name] = line
            written = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "lines": list(lines.values())}
            path.write_text(json.dumps(written, indent=1) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

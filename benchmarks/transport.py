"""Dispatch and collect against verl's single controller, and the transfer queue against TransferQueue; a copy in memory beside them.

Two runs of turns, A B A B: of dispatch, with 2 and 8 workers, and of the queues. Medians of the turns' medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.duel import OURS, Side, duel
from benchmarks.machine import describe
from benchmarks.tables import DISPATCHED, QUEUED, TOKENS, WORKERS

PEERS = Path("build/transport-venv/bin/python")
RESULT = Path("benchmarks/results/transport.json")
THREADS = 1
ROUNDS = 5


@dataclass(frozen=True)
class TransportSide(Side):
    """Peers of transport have an environment of their own."""

    @property
    def python(self) -> Path:
        return OURS if self.module.endswith("_braid") else PEERS


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the tables, and writes them to benchmarks/results/transport.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks transport")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side")
    parser.add_argument("--workers", type=int, nargs="*", default=list(WORKERS))
    parser.add_argument("--only", choices=("dispatch", "queue"), help="one of the two")
    chosen = parser.parse_args(arguments)
    # TransferQueue sets its own number of threads.
    os.environ.update(TQ_NUM_THREADS=str(THREADS), RAY_USAGE_STATS_ENABLED="0")
    rows: list[dict[str, Any]] = []
    if chosen.only != "queue":
        case = {"workers": chosen.workers}
        rows += dispatch_rows(
            measured(["dispatch_braid", "dispatch_verl", "copy_braid"], case, chosen.rounds), chosen.workers
        )
    if chosen.only != "dispatch":
        rows += queue_rows(measured(["queue_braid", "queue_transferqueue", "copy_braid"], {}, chosen.rounds))
    print(table(rows))
    found = {
        "benchmark": "transport",
        "date": datetime.date.today().isoformat(),
        "machine": describe(THREADS),
        "load": os.getloadavg()[0],
        "rounds": chosen.rounds,
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


def measured(modules: list[str], case: Mapping[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    return duel([TransportSide(module, module, case) for module in modules], rounds, THREADS)


def dispatch_rows(found: Mapping[str, Mapping[str, Any]], workers: list[int]) -> list[dict[str, Any]]:
    """One row for each size and way."""
    rows = []
    for size in workers:
        for tokens in TOKENS:
            name = f"{size} workers, {tokens} tokens"
            for way in ("held", "handles"):
                rows.append(
                    row(
                        f"dispatch and collect, {name}, {way}",
                        4 * 8 * DISPATCHED * tokens,
                        found,
                        ("dispatch_braid", f"{name}, {way}"),
                        ("dispatch_verl", name),
                        f"copy {tokens} tokens",
                    )
                )
    return rows


def queue_rows(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        row(
            f"queue {way}, {rows} rows x {tokens}",
            4 * 4 * rows * tokens,
            found,
            ("queue_braid", f"{way} {rows} rows"),
            ("queue_transferqueue", f"{way} {rows} rows"),
            f"copy {rows} rows",
        )
        for rows, tokens in QUEUED
        for way in ("put", "get")
    ]


def row(
    name: str,
    size: int,
    found: Mapping[str, Mapping[str, Any]],
    ours: tuple[str, str],
    theirs: tuple[str, str],
    copy: str,
) -> dict[str, Any]:
    """Seconds of both sides and of a copy of the same `size` bytes, with every turn's."""
    (our_side, our_key), (their_side, their_key) = ours, theirs
    our_seconds, their_seconds = found[our_side][our_key], found[their_side][their_key]
    return {
        "row": name,
        "peer": their_side.split("_")[1],
        "bytes": size,
        "braid_seconds": our_seconds,
        "peer_seconds": their_seconds,
        "times": round(their_seconds / our_seconds, 2),
        "copy_seconds": found["copy_braid"][copy],
        "braid_turns": [turn[our_key] for turn in found[our_side]["turns"]],
        "peer_turns": [turn[their_key] for turn in found[their_side]["turns"]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For people: milliseconds, and how many times faster Braid is."""
    lines = [f"{'':58}{'Braid ms':>10}{'peer ms':>10}{'times':>8}{'copy ms':>10}"]
    for r in rows:
        cells = "".join(f"{1000 * r[key]:10.2f}" for key in ("braid_seconds", "peer_seconds"))
        mark = "" if r["times"] > 1 else "   BEHIND"
        lines.append(f"{r['row']:58}{cells}{r['times']:8.2f}{1000 * r['copy_seconds']:10.2f}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

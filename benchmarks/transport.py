"""Dispatch and collect against verl's single controller, and the transfer queue against TransferQueue, beside a copy in
memory.

Two sets of turns, A B A B: dispatch with 2 and 8 workers, and the queues. Figures are medians of the turns' medians.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.case import Case, Found, Rates
from benchmarks.duel import Side
from benchmarks.tables import AT_ONCE, BATCH, BATCHES, DISPATCHED, QUEUED, SMALL, TOKENS, WORKERS, queued, values

THREADS = 1
ROUNDS = 5


def transport() -> list[Case]:
    """Return the cases: dispatch with 2 and 8 workers, and the queues."""
    return [
        transport_case(
            "dispatch and collect",
            ["dispatch_braid", "dispatch_verl", "copy_braid"],
            {"workers": list(WORKERS)},
            dispatch_rows,
        ),
        transport_case("queues", ["queue_braid", "queue_transferqueue", "copy_braid"], {}, queue_rows),
    ]


@dataclass(frozen=True)
class TransportCase(Case):
    """A transport case; `rows` turns the sides' numbers into one row for each size and way."""

    rows: Callable[[Found], list[dict[str, Any]]] = field(kw_only=True)

    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        return {"rows": self.rows(found)}

    def table(self, summary: Mapping[str, Any]) -> str:
        return table(summary["rows"])


@dataclass(frozen=True)
class QueueControlCase(Case):
    """Cost of the queue's bookkeeping on one core, without a peer."""

    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        (side,) = found.values()
        return {name: number for name, number in side.items() if "work" in name or "clients" in name or name == "turns"}

    def table(self, summary: Mapping[str, Any]) -> str:
        lines = []
        for name, number in summary.items():
            if name != "turns":
                lines.append(f"{name:40}" + (f"{1e6 * number:10.1f} us" if "work" in name else f"{number:10.0f}"))
        return "\n".join(lines)


def queue_control() -> list[Case]:
    """Return the case: take and done of one row with 1,024 to 1,000,000 rows in work, and rows per second through one
    socket.
    """
    return [QueueControlCase("bookkeeping", [Side("queue", "queue_control_braid", {})], 3, 1)]


def transport_case(
    name: str, modules: list[str], case: Mapping[str, Any], rows: Callable[[Found], list[dict[str, Any]]]
) -> TransportCase:
    return TransportCase(name, [Side(module, module, case) for module in modules], ROUNDS, THREADS, rows=rows)


def dispatch_rows(found: Found) -> list[dict[str, Any]]:
    """Return one row for each size and way."""
    rows = []
    for size in WORKERS:
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


def queue_rows(found: Found) -> list[dict[str, Any]]:
    """Return a row for each shape put and got, with percentiles for small ones, and one for many threads at once."""
    cells = [(f"{way} {name}", name, shape, 1) for name, shape in QUEUED.items() for way in ("put", "get")]
    for way in ("put", "get"):
        cells += [(f"{way} small, {which}", "small", SMALL, 1) for which in ("median", "99th percentile")]
    cells += [(f"{threads} at once", "batch", BATCH, threads * BATCHES) for threads in AT_ONCE]
    return [
        queue_row(key, copied, shape, times, found) | {"rows_per_second": shape[0] * times / found["queue_braid"][key]}
        for key, copied, shape, times in cells
    ]


def queue_row(key: str, copied: str, shape: tuple[int, int], times: int, found: Found) -> dict[str, Any]:
    size = times * sum(values(column).nbytes for column in queued(*shape).values())
    return row(f"queue {key}", size, found, ("queue_braid", key), ("queue_transferqueue", key), f"copy {copied}")


def row(
    name: str,
    size: int,
    found: Found,
    ours: tuple[str, str],
    theirs: tuple[str, str],
    copy: str,
) -> dict[str, Any]:
    """Return the seconds of both sides and of a copy of `size` bytes, with every turn's."""
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
    """Return a table in milliseconds, with the ratio of the peer to Braid."""
    lines = [f"{'':58}{'Braid ms':>10}{'peer ms':>10}{'times':>8}{'copy ms':>10}"]
    for r in rows:
        cells = "".join(f"{1000 * r[key]:10.2f}" for key in ("braid_seconds", "peer_seconds"))
        mark = "" if r["times"] > 1 else "   BEHIND"
        lines.append(f"{r['row']:58}{cells}{r['times']:8.2f}{1000 * r['copy_seconds']:10.2f}{mark}")
    return "\n".join(lines)

"""Tables that every side of the transport benchmarks moves, and the check that all of their bytes arrive."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("tokens", "positions", "mask", "responses")
DISPATCHED = 256
WORKERS = (2, 8)
TOKENS = (128, 8192)
QUEUED = {"512 rows x 8192": (512, 8192), "128 ragged rows": (128, 0), "10000 rows x 64": (10_000, 64)}
"""Rows, and float32 values per row and column; 0 stands for ragged rows of 16 to 4,096 values."""
SMALL = (8, 64)
SMALL_REPEATS = 100
AT_ONCE = (1, 4, 16)
"""Number of threads that put and get at the same time."""
BATCHES, BATCH = 10, (64, 64)
"""Number of tables that each thread passes through."""


def dispatched(tokens: int) -> dict[str, Tensor]:
    """Return four columns (256, `tokens`) of int64, the same in every process."""
    generator = torch.Generator().manual_seed(tokens)
    return {name: torch.randint(0, 50_000, (DISPATCHED, tokens), generator=generator) for name in COLUMNS}


def queued(rows: int, tokens: int) -> dict[str, Tensor]:
    """Return four float32 columns of whole numbers, whose sums are exact in float64: (`rows`, `tokens`), or jagged."""
    generator = torch.Generator().manual_seed(tokens)
    if tokens:
        return {name: torch.randint(0, 100, (rows, tokens), generator=generator).float() for name in COLUMNS}
    offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.randint(16, 4097, (rows,), generator=generator).cumsum(0)]
    )
    return {
        name: torch.nested.nested_tensor_from_jagged(
            torch.randint(0, 100, (int(offsets[-1]),), generator=generator).float(), offsets
        )
        for name in COLUMNS
    }


def values(column: Tensor) -> Tensor:
    """Return the values of a column, jagged or dense."""
    return column.values() if column.is_nested else column


def many_threads(threads: int, passage: Callable[[int], object]) -> float:
    """Return the seconds that numbered threads need when they run `work` at the same time."""
    workers = [threading.Thread(target=passage, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def percentile(times: Sequence[float], share: float) -> float:
    """Return the least of the given seconds that at least this share of them does not exceed."""
    return sorted(times)[min(len(times) - 1, math.ceil(share * len(times)) - 1)]


def turn(once: Callable[[str, tuple[int, int]], tuple[float, float]]) -> dict[str, float]:
    """Measure one turn of a queue's side; `once` passes a table through and returns the seconds of its put and its
    get.
    """
    found: dict[str, float] = {}
    for name, shape in QUEUED.items():
        times = [once(name, shape) for _ in range(3)]
        found[f"put {name}"], found[f"get {name}"] = map(median, zip(*times, strict=True))
    small = zip(*(once("small", SMALL) for _ in range(SMALL_REPEATS)), strict=True)
    for way, ways in zip(("put", "get"), small, strict=True):
        found[f"{way} small, median"], found[f"{way} small, 99th percentile"] = median(ways), percentile(ways, 0.99)
    for threads in AT_ONCE:
        found[f"{threads} at once"] = many_threads(
            threads, lambda number: [once(f"batch {number}", BATCH) for _ in range(BATCHES)]
        )
    return found


def read(columns: Iterable[Tensor]) -> list[float]:
    """Return the sum of each column. This reads every byte, in the same way on every side."""
    return [float(column.sum()) for column in columns]


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `work` over several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def repeats(tokens: int) -> int:
    """Return how often a turn repeats one thing; short things are repeated more often."""
    return 2 if tokens > 1000 else 8

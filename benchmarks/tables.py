"""The tables that every side of the transport benchmarks moves, and how it proves that all of their bytes have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("tokens", "positions", "mask", "responses")
DISPATCHED = 256
WORKERS = (2, 8)
TOKENS = (128, 8192)
QUEUED = ((512, 8192), (8, 64))


def dispatched(tokens: int) -> dict[str, Tensor]:
    """Four columns (256, `tokens`) int64, the same in every process."""
    generator = torch.Generator().manual_seed(tokens)
    return {name: torch.randint(0, 50_000, (DISPATCHED, tokens), generator=generator) for name in COLUMNS}


def queued(rows: int, tokens: int) -> dict[str, Tensor]:
    """Four columns (`rows`, `tokens`) float32 of whole numbers, whose sums are exact in double precision."""
    generator = torch.Generator().manual_seed(tokens)
    return {name: torch.randint(0, 100, (rows, tokens), generator=generator).float() for name in COLUMNS}


def read(columns: Iterable[Tensor]) -> list[float]:
    """The sum of each column: every byte is read, in the same way on every side."""
    return [float(column.sum()) for column in columns]


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Seconds that `work` takes, the median of several times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def repeats(tokens: int) -> int:
    """How often a turn does one thing: what is short more often."""
    return 2 if tokens > 1000 else 8

"""Description of the machine, its matrix rate and its memory bandwidth, measured in the same run as the benchmark."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

SIDE, SMALL_SIDE, NUMBERS = 2048, 256, 1 << 26
"""Rows of the square matrices that are multiplied, of those where a processor is slow, and float32 elements that are
read.
"""
SLOW_S = 0.005
"""Least seconds of a product of small matrices where a processor is slow: without units for bfloat16 it takes 0.025."""
REPEATS, SECONDS = 7, 0.3
"""Least number of timings of each kind, and least seconds: with other programs running, few timings are undisturbed."""
DTYPES = ("float32", "bfloat16", "float64")


def describe(threads: int) -> dict[str, Any]:
    """Return processor, memory and versions, but neither host names nor paths."""
    import transformers

    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor()),
        "family": facts.get("cpu family"),
        "threads": threads,
        "vector_units": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile") if flag in flags],
        "memory_gib": round(int(Path("/proc/meminfo").read_text().split()[1]) / 2**20, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(threads: int) -> dict[str, float]:
    """Return floating-point operations per second by dtype (the faster of torch's two libraries) and bytes read per
    second.
    """
    torch.set_num_threads(threads)
    found = {}
    for name in DTYPES:
        small, large = (torch.randn(side, side).to(getattr(torch, name)) for side in (SMALL_SIDE, SIDE))
        matrix = large if shortest(partial(torch.matmul, small, small)) < SLOW_S else small
        ways: list[Callable[[], Any]] = [partial(torch.matmul, matrix, matrix)]
        if name in fast_dtypes():
            ways.append(partial(torch.ops.mkldnn._linear_pointwise, matrix, matrix, None, "none", [], ""))
        found[f"{name}_operations_per_second"] = max(2 * len(matrix) ** 3 / shortest(way) for way in ways)
    store = torch.ones(NUMBERS)
    return {**found, "bytes_per_second": store.nbytes / shortest(store.sum)}


def fast_dtypes() -> list[str]:
    """Return the dtypes in which oneDNN multiplies on this processor; without bfloat16 units it refuses bfloat16."""
    if not torch.backends.mkldnn.is_available():
        return []
    return ["float32", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


def shortest(work: Callable[[], Any]) -> float:
    """Return the minimum of several timings in seconds: disturbances only add time."""
    work()
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    import sys

    print(json.dumps(describe(int(sys.argv[1]))))

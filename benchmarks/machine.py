"""What the machine can do: its description, its matrix rate and its memory's bandwidth, measured in the same run as the rest."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

SIDE = 2048
COPIED = 1 << 26
REPEATS = 7


def describe(threads: int) -> dict[str, Any]:
    """Processor, memory and versions; neither host names nor paths."""
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
    """Floating-point operations per second by dtype, the faster of torch's two libraries, and bytes per second of reading."""
    torch.set_num_threads(threads)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
        ways: list[Callable[[], Any]] = [partial(torch.matmul, a, b)]
        if torch.backends.mkldnn.is_available():
            ways.append(partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], ""))
        name = str(dtype).removeprefix("torch.")
        found[f"{name}_operations_per_second"] = max(2 * SIDE**3 / seconds(way) for way in ways)
    store = torch.ones(COPIED)
    found["bytes_per_second"] = store.numel() * store.element_size() / seconds(store.sum)
    return found


def seconds(work: Callable[[], Any]) -> float:
    """The least of several times, since what disturbs only adds to it."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    assert median(times) > 0
    return min(times)


if __name__ == "__main__":
    import sys

    count = int(sys.argv[1])
    print(json.dumps({"machine": describe(count), "rates": measure(count)}))

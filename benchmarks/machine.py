"""Description of the machine, its matrix rate and its memory bandwidth, measured in the same run as the benchmark."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from braidrl.training.operations import measured_rates


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
    """Return floating-point operations per second by dtype (the faster of torch's two libraries) and bytes read per second."""
    torch.set_num_threads(threads)
    rates = measured_rates()
    named = {f"{dtype}_operations_per_second": rate for dtype, rate in rates.operations.items()}
    return {**named, "bytes_per_second": rates.bandwidth}


if __name__ == "__main__":
    import sys

    count = int(sys.argv[1])
    print(json.dumps({"machine": describe(count), "rates": measure(count)}))

"""Compare a plan's memory with a process's memory, counted from before it loads a model.

python -m benchmarks.planning.memory [FILE]    writes FILE, or benchmarks/results/plan_memory.json
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.planning.machine import RESULTS, SHAPES, Case, configuration, write_model
from braidrl.cluster.device_kinds import read_cluster
from braidrl.config import load_config
from braidrl.plan.configured import predicted
from braidrl.plan.problem import Problem, batch_lengths
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.run import TrainingRun
from tests.tiny import sums, write_jsonl

SHAPES["wide"] = (640, 8)
MIB = 1 << 20


def main() -> None:
    """Train two steps of GRPO in this process, and write both figures."""
    with TemporaryDirectory() as folder:
        result = compared(Path(folder))
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "plan_memory.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(result)


def peak_bytes() -> int:
    """Return this process's peak memory. `getrusage` would include the peak of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def compared(root: Path) -> dict[str, Any]:
    """Return both figures of runs in a folder, in MiB, and their ratio."""
    write_jsonl(root / "sums.jsonl", sums(80))
    # Warm up: a small model loads the libraries that are loaded at first use.
    small = root / "small.yaml"
    write_model(root / "model-a", "a")
    tree = configuration(Case("small", "a", 2), root)
    tree["trainer"]["steps"] = 1
    small.write_text(json.dumps(tree))
    with TrainingRun(load_config(small)) as warm:
        warm.train()
    write_model(root / "model-wide", "wide")
    path = root / "run.yaml"
    tree = configuration(replace(Case("run", "wide", 4)), root)
    # Less than the batch has, so that micro-batches are as full as the plan assumes.
    tree["trainer"] |= {"steps": 2, "max_tokens_per_device": 512}
    path.write_text(json.dumps(tree))
    config = load_config(path)
    problem = Problem(config, build_flow(config), read_cluster("1x1xcpu"), batch_lengths(config))
    said = predicted(problem).sets[0].memory
    before = psutil.Process().memory_info().rss
    with TrainingRun(config) as run:
        run.train()
    taken = peak_bytes() - before
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "said_mib": round(said / MIB),
        "taken_mib": round(taken / MIB),
        "ratio": round(said / taken, 3),
    }


if __name__ == "__main__":
    main()

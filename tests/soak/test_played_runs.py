"""Runs of many devices, of which a few processes are real: what a process does follows from its own rows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.__main__ import write_model
from benchmarks.scale.streaming import GROUPS, SAMPLES

SIZES, ROWS = (8, 64), GROUPS * SAMPLES


def played(folder: Path, runtime: str) -> dict[int, dict[str, Any]]:
    """Return what the processes of a run do in a step, by the number of devices."""
    write_model(folder / "model")
    (folder / "run.yaml").write_text("{}")
    found = {}
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.scale", "--runtime", runtime, "--folder", str(folder)]
        ended = subprocess.run([*command, "--play", "0", str(size)], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-8000:]
        found[size] = json.loads(ended.stdout.splitlines()[-1])["parts"]
        print(size, json.dumps(found[size], indent=1))
    return found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_processes_of_a_larger_streaming_run_send_as_much_as_those_of_a_small_one(tmp_path: Path) -> None:
    small, large = played(tmp_path, "streaming").values()
    # All ranks meet for each lease; an even rank passes on what comes to others.
    of_lease = [each["actor-1"]["bytes"] / (1 + each["actor-1"]["leases"]) for each in (small, large)]
    assert of_lease[1] < 1.3 * of_lease[0]
    assert large["actor-1"]["leases"] <= 2 * math.log2(ROWS), "leases grow and shrink within an update"
    grown = SIZES[1] / SIZES[0]
    for name in ("messages", "bytes"):
        assert large["controller, step"][name] < 1.3 * grown * small["controller, step"][name]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_hybrid_driver_makes_as_many_calls_of_each_worker_of_a_larger_run(tmp_path: Path) -> None:
    small, large = played(tmp_path, "hybrid").values()
    grown = SIZES[1] / SIZES[0]
    for name in ("messages", "bytes"):
        assert large["driver, step"][name] < 1.3 * grown * small["driver, step"][name]

"""The cost of a call of a user's verifier in each sandbox, beyond its own work: the verifier compares two texts.

python -m benchmarks.verifier_calls --calls 500 --name after

Writes medians and processor time per call, one call at a time and 2 at once, into
benchmarks/results/verifier_calls.json. Processor time is that of the run and of all its processes; unlike milliseconds
it depends little on other work on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from braidrl.config import RewardConfig
from braidrl.rewards.pool import RewardPool
from braidrl.rewards.verifier import Completion, resolve

RESULTS = Path("benchmarks/results/verifier_calls.json")
ROW = Completion("p", "4", "4")
MODES = ("none", "process", "bubblewrap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--name", default="after", help="under which the figures are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.py")
        file.write_text("def right(response, answer):\n    return response == answer\n")
        found = {mode: measured(f"{file}:right", mode, arguments.calls) for mode in MODES}
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    head = {
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }
    RESULTS.write_text(
        json.dumps(kept | {arguments.name: head | {"calls": arguments.calls, "modes": found}}, indent=1) + "\n"
    )
    for mode, figures in found.items():
        print(f"{mode:11}" + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))


def measured(verifier: str, mode: str, calls: int) -> dict[str, float]:
    """Return milliseconds and processor time of a call, and calls per second."""
    checked = resolve(verifier)
    with RewardPool(RewardConfig(sandbox=mode, processes=2)) as pool:
        for _ in range(20):
            assert pool.submit(ROW, checked).result(60).correct
        time.sleep(0.5)
        started, waits = processor_s(), list[float]()
        for _ in range(calls):
            start = time.monotonic()
            assert pool.submit(ROW, checked).result(60).correct
            waits.append(1e3 * (time.monotonic() - start))
        time.sleep(0.5)  # the last copies end
        alone, start = processor_s() - started, time.monotonic()
        assert all(future.result(60).correct for future in [pool.submit(ROW, checked) for _ in range(calls)])
        seconds = time.monotonic() - start
    return {
        "median_ms": statistics.median(waits),
        "fastest_ms": min(waits),
        "processor_ms": 1e3 * alone / calls,
        "calls_per_s": calls / seconds,
    }


def processor_s() -> float:
    """Return the processor time of this process and of all that it started, ended ones included."""
    total = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


if __name__ == "__main__":
    main()

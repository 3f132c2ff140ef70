"""`python -m benchmarks.losses`: seconds from the loss of a rank to the next optimizer step, by the way back.

memory       the other ranks undo the step and make it again            data parallelism, trainer.max_restarts
checkpoint   the other ranks load the newest checkpoint, in place        shard=full, trainer.max_restarts
restart      all processes start again by `braid train --resume`        what a run without trainer.max_restarts needs

A rank is killed by SIGKILL in the middle of a run of three ranks on this machine's CPUs; the clock runs until the next
step's line is in `metrics.jsonl`. The step itself is part of the time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from braidrl.cluster.watchdog import descendants, name_of
from braidrl.observe.metrics import read_metrics
from tests.tiny import Workshop, braid, sums, wait_for_steps, write_jsonl, write_model

RANKS, LOOK_S, LIMIT_S = 3, 0.01, 120.0
WAYS: dict[str, dict[str, Any]] = {
    "memory": {"max_restarts": 1},
    "checkpoint": {"max_restarts": 1, "layout": {"shard": "full"}},
    "restart": {},
}


def kill_a_rank(run: subprocess.Popen[str]) -> None:
    """Kill the last rank."""
    ranks = [pid for pid in descendants(run.pid) if name_of(pid) == f"rank {RANKS - 1}"]
    os.kill(ranks[0], signal.SIGKILL)


def seconds_to_next_step(shop: Workshop, way: str) -> tuple[float, float]:
    """Return the seconds from a rank's death to the next step's line, and those of an undisturbed step."""
    name = f"{way}-{time.time_ns()}"
    trainer = {"steps": 12, "checkpoint_every": 1, "prompts_per_step": 6, **WAYS[way]}
    config = shop.config_file(name, runtime="distributed", workers=RANKS, trackers=[], trainer=trainer)
    with braid("train", config, folder=shop.folder) as process:
        wait_for_steps(shop.folder / name, 4, process)
        made = len(read_metrics(shop.folder / name))
        start = time.monotonic()
        kill_a_rank(process)
        if way == "restart":
            process.communicate(timeout=LIMIT_S)
            process = braid("train", "--resume", shop.folder / name, folder=shop.folder)
            made = len(read_metrics(shop.folder / name))
        while len(read_metrics(shop.folder / name)) <= made:
            assert time.monotonic() < start + LIMIT_S and process.poll() is None, "there is no next step"
            time.sleep(LOOK_S)
        seconds = time.monotonic() - start
        process.communicate(timeout=LIMIT_S)
    lines = read_metrics(shop.folder / name)
    return seconds, statistics.median(line["time/step"] for line in lines[1:])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="losses-"))
    shop = Workshop(folder, write_model(folder / "model"), write_jsonl(folder / "train.jsonl", sums(24)))
    print(f"| way back | seconds, median of {options.times} | least | largest | an undisturbed step |")
    print("|---|---|---|---|---|")
    for way in options.ways:
        found = [seconds_to_next_step(shop, way) for _ in range(options.times)]
        seconds, step = [each for each, _ in found], statistics.median(each for _, each in found)
        print(f"| {way} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} | {step:.2f} |")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

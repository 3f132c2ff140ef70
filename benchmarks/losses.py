"""`python -m benchmarks.losses`: seconds from the loss of a rank to the next optimizer step, by runtime and way back;
writes benchmarks/results/losses.json.

memory       the other ranks undo the step and make it again            data parallelism, trainer.max_restarts
shards       the other ranks make their models anew, with the shards    shard=full, trainer.max_restarts
             of the copies in their memory
checkpoint   one rank is left, and loads the newest checkpoint          shard=full, trainer.max_restarts
restart      all processes start again by `braid train --resume`        what a run without trainer.max_restarts needs

A rank is killed by SIGKILL in the middle of a run of three ranks on this machine's CPUs, for `checkpoint` two at once;
the clock runs until the next step's line is in `metrics.jsonl`. The step itself is part of the time. Under streaming
the ranks are the actor's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from braidrl.cluster.watchdog import descendants, name_of
from braidrl.observe.metrics import read_metrics
from tests.tiny import Workshop, braid, sums, wait_for_steps, write_jsonl, write_model

RANKS, LOOK_S, LIMIT_S = 3, 0.01, 120.0
RESULT = Path("benchmarks/results/losses.json")
RUNTIMES: dict[str, tuple[dict[str, Any], str]] = {
    # Settings, and what the names of the ranks' processes begin with.
    "distributed": ({"workers": RANKS}, "rank "),
    "streaming": ({"streaming": {"workers": {"actor": RANKS}}}, "actor-"),
}
WAYS: dict[str, dict[str, Any]] = {
    "memory": {"max_restarts": 1},
    "shards": {"max_restarts": 1, "layout": {"shard": "full"}},
    "checkpoint": {"max_restarts": 2, "layout": {"shard": "full"}},
    "restart": {},
}
LOST = {"checkpoint": (1, 2)}
"""The ranks that are killed, if not the last one alone."""


def seconds_to_next_step(shop: Workshop, runtime: str, way: str) -> tuple[float, float]:
    """Return the seconds from a rank's death to the next step's line, and those of an undisturbed step."""
    name, (settings, process_name) = f"{runtime}-{way}-{time.time_ns()}", RUNTIMES[runtime]
    trainer = {"steps": 12, "checkpoint_every": 1, "prompts_per_step": 6, **WAYS[way]}
    config = shop.config_file(name, runtime=runtime, **settings, trackers=[], trainer=trainer)
    with braid("train", config, folder=shop.folder) as process:
        wait_for_steps(shop.folder / name, 4, process)
        made = len(read_metrics(shop.folder / name))
        start = time.monotonic()
        victims = [f"{process_name}{rank}" for rank in LOST.get(way, (RANKS - 1,))]
        for pid in [pid for pid in descendants(process.pid) if name_of(pid) in victims]:
            os.kill(pid, signal.SIGKILL)
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
    """Print a table, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="losses-"))
    shop = Workshop(folder, write_model(folder / "model"), write_jsonl(folder / "train.jsonl", sums(24)))
    head = {"benchmark": "losses", "date": datetime.date.today().isoformat(), "ranks": RANKS, "cores": os.cpu_count()}
    known = json.loads(RESULT.read_text())["ways"] if RESULT.exists() else {}
    result: dict[str, Any] = head | {"ways": known}
    print(f"| runtime | way back | seconds, median of {options.times} | least | largest | an undisturbed step |")
    print("|---|---|---|---|---|---|")
    for runtime in options.runtimes:
        for way in options.ways:
            times = [seconds_to_next_step(shop, runtime, way) for _ in range(options.times)]
            seconds, step = [each for each, _ in times], statistics.median(each for _, each in times)
            result["ways"][f"{runtime}, {way}"] = {"seconds": seconds, "step_s": step}
            median = f"{statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f}"
            print(f"| `{runtime}` | {way} | {median} | {step:.2f} |", flush=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.loading`: a run whose data is one long file. Seconds until its first step, until the whole file
is tokenised, and the memory of each rank; writes benchmarks/results/loading.json.

lines  ranks │ start ──first step──────── steps go on ─────────── table whole │ a run with 1,000 lines for comparison

`braid train` runs as a user would start it, with a tiny model on this machine's CPUs and an empty cache. Lines have 12
to 20 tokens. Memory is what a rank has alone (USS): pages of the table belong to the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe
from braidrl.cluster.watchdog import descendants, name_of
from tests.tiny import Workshop, braid, write_model

RESULT = Path(__file__).parent / "results" / "loading.json"
FEW, LOOK_S, LIMIT_S = 1_000, 0.05, 1200.0


def write_lines(path: Path, count: int) -> Path:
    """Write sums of two numbers of five to eight digits."""
    with path.open("w") as file:
        for row in range(count):
            first, second = 10_007 * (row % 9_973 + 1), 101 * (row % 7_919 + 99)
            file.write(f'{{"prompt": "{first}+{second}=", "answer": "{first + second}"}}\n')
    return path


def processes_of(pid: int, ranks: int) -> list[psutil.Process]:
    """Return the processes of the ranks, in order."""
    if ranks == 1:
        return [psutil.Process(pid)]
    named = {name_of(each): each for each in descendants(pid)}
    return [psutil.Process(named[f"rank {rank}"]) for rank in range(ranks)]


def measure(shop: Workshop, lines: int, ranks: int) -> dict[str, Any]:
    """Return what a run over a number of lines takes."""
    name, cache = f"{lines}-on-{ranks}", shop.folder / f"cache-{lines}-{ranks}"
    runtime: dict[str, Any] = {"runtime": "distributed", "workers": ranks} if ranks > 1 else {"runtime": "eager"}
    data = {"train": str(shop.folder / f"{lines}.jsonl"), "cache": str(cache), "in_memory": FEW - 1}
    trainer = {"steps": 1_000_000, "prompts_per_step": 4, "checkpoint_every": 0}
    config = shop.config_file(name, **runtime, data=data, trainer=trainer, trackers=[])
    metrics, start = shop.folder / name / "metrics.jsonl", time.monotonic()
    result: dict[str, Any] = {"lines": lines, "ranks": ranks}
    with braid("train", config, folder=shop.folder) as process:
        found, memory = list[psutil.Process](), list[list[float]]()
        while "whole_s" not in result:
            assert process.poll() is None and time.monotonic() < start + LIMIT_S, process.communicate()
            passed = time.monotonic() - start
            if "first_step_s" not in result and metrics.is_file() and metrics.read_text():
                result["first_step_s"] = passed
                found = processes_of(process.pid, ranks)
                result["first_step_cpu_s"] = sum(sum(each.cpu_times()[:2]) for each in found)
            if found:
                memory.append([each.memory_full_info().uss / 2**20 for each in found])
            if found and any(cache.rglob("facts.json")):
                result["whole_s"], result["whole_cpu_s"] = passed, sum(sum(each.cpu_times()[:2]) for each in found)
            time.sleep(LOOK_S)
        result["steps_until_whole"] = metrics.read_text().count("\n")
        time.sleep(2)
        memory.append([each.memory_full_info().uss / 2**20 for each in found])
        result["uss_mib"] = {"first step": memory[0], "end": memory[-1]}
        result["uss_mib"]["most"] = [max(each) for each in zip(*memory, strict=True)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    shutil.rmtree(cache)
    return result


def main() -> None:
    """Print a table, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
    parser.add_argument("--lines", type=int, default=2_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="loading-"))
    shop, runs = Workshop(folder, write_model(folder / "model"), folder), []
    for lines in (FEW, options.lines):
        write_lines(folder / f"{lines}.jsonl", lines)
    print("| lines | ranks | first step, s | CPU s | whole table, s | CPU s | steps until then | USS of a rank, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        for lines in (FEW, options.lines):
            made = measure(shop, lines, ranks)
            runs.append(made)
            uss = made["uss_mib"]
            memory = ", ".join(f"{name} {max(uss[name]):.0f}" for name in ("first step", "most", "end"))
            print(
                f"| {lines:,} | {ranks} | {made['first_step_s']:.1f} | {made['first_step_cpu_s']:.1f} | "
                f"{made['whole_s']:.1f} | {made['whole_cpu_s']:.1f} | {made['steps_until_whole']} | {memory} |",
                flush=True,
            )
    about = {"date": datetime.date.today().isoformat(), **describe(1), "cores": os.cpu_count()}
    RESULT.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.loading`: a run whose data is one long file. Seconds until its first step, until the whole file
is tokenised, and the memory of each rank; writes benchmarks/results/loading.json.

lines  ranks │ start ──first step──────── steps go on ─────────── table whole │ a run with 1,000 lines for comparison

    python -m benchmarks.loading --forms          # a million prompts as parquet, as a folder, as one list

`braid train` runs as a user would start it, with a tiny model on this machine's CPUs and an empty cache. Lines have 12
to 20 tokens. Memory is what a rank has alone (USS): pages of the table belong to the file. With `--forms` the whole
data is read before the first step: the seconds until a line about it count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe
from braidrl.cluster.watchdog import descendants, name_of
from tests.tiny import Workshop, write_model

RESULT = Path(__file__).parent / "results" / "loading.json"
FEW, LOOK_S, LIMIT_S = 1_000, 0.05, 1200.0
LOOK_AT_MEMORY_S = 1.0


def sums(count: int) -> Iterator[dict[str, str]]:
    """Yield sums of two numbers of five to eight digits."""
    for row in range(count):
        first, second = 10_007 * (row % 9_973 + 1), 101 * (row % 7_919 + 99)
        yield {"prompt": f"{first}+{second}=", "answer": str(first + second)}


def write_lines(path: Path, count: int) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in sums(count))
    return path


def write_forms(folder: Path, count: int) -> dict[str, Path]:
    """Write the same prompts in the forms that are read whole."""
    import pyarrow
    import pyarrow.parquet

    forms = {"parquet": folder / "sums.parquet", "list": folder / "sums.json", "folder": folder / "sums"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(sums(count))), forms["parquet"])
    forms["list"].write_text(json.dumps(list(sums(count))))
    forms["folder"].mkdir()
    write_lines(forms["folder"] / "train.jsonl", count)
    return forms


@contextmanager
def running(config: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `braid train`, and interrupt it at the end of the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # A pipe that is not read would stop the run.
    with output.open("wb") as file:
        command = [sys.executable, "-m", "braidrl.cli", "train", str(config)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)


def processes_of(pid: int, ranks: int) -> list[psutil.Process]:
    """Return the processes of the ranks, in order."""
    if ranks == 1:
        return [psutil.Process(pid)]
    named = {name_of(each): each for each in descendants(pid)}
    return [psutil.Process(named[f"rank {rank}"]) for rank in range(ranks)]


def configured(shop: Workshop, name: str, data: Path, ranks: int) -> Path:
    """Write the configuration of a run without an end."""
    runtime: dict[str, Any] = {"runtime": "distributed", "workers": ranks} if ranks > 1 else {"runtime": "eager"}
    section = {"train": str(data), "cache": str(shop.folder / f"cache-{name}"), "in_memory": FEW - 1}
    trainer = {"steps": 1_000_000, "prompts_per_step": 4, "checkpoint_every": 0}
    return shop.config_file(name, **runtime, data=section, trainer=trainer, trackers=[])


def measure(shop: Workshop, name: str, data: Path, ranks: int) -> dict[str, Any]:
    """Return what a run takes until all of its data is tokenised."""
    config, cache, output = (
        configured(shop, name, data, ranks),
        shop.folder / f"cache-{name}",
        shop.folder / f"{name}.txt",
    )
    metrics, start, looked = shop.folder / name / "metrics.jsonl", time.monotonic(), 0.0
    result: dict[str, Any] = {"data": data.name, "ranks": ranks}
    with running(config, output) as process:
        found, memory = list[psutil.Process](), list[list[float]]()
        while "whole_s" not in result or "first_step_s" not in result:
            assert process.poll() is None and time.monotonic() < start + LIMIT_S, output.read_text()
            passed = time.monotonic() - start
            if "cache_s" not in result and cache.is_dir():
                result["cache_s"] = passed
            if "first_line_s" not in result and output.stat().st_size:
                result["first_line_s"], result["first_line"] = passed, output.read_text().splitlines()[0]
            if "first_step_s" not in result and metrics.is_file() and metrics.read_text():
                result["first_step_s"] = passed
                found = processes_of(process.pid, ranks)
                result["first_step_cpu_s"] = sum(sum(each.cpu_times()[:2]) for each in found)
            if "whole_s" not in result and any(cache.rglob("facts.json")):
                of_all = found or processes_of(process.pid, ranks)
                result["whole_s"], result["whole_cpu_s"] = passed, sum(sum(each.cpu_times()[:2]) for each in of_all)
            if found and passed > looked + LOOK_AT_MEMORY_S:
                memory.append([each.memory_full_info().uss / 2**20 for each in found])
                looked = passed
            time.sleep(LOOK_S)
        result["steps_until_whole"] = metrics.read_text().count("\n")
        time.sleep(2)
        memory.append([each.memory_full_info().uss / 2**20 for each in found])
        result["uss_mib"] = {"first step": memory[0], "end": memory[-1]}
        result["uss_mib"]["most"] = [max(each) for each in zip(*memory, strict=True)]
    shutil.rmtree(cache)
    return result


def row_of(result: Mapping[str, Any]) -> str:
    """Return a measurement as a line of the table."""
    uss = result["uss_mib"]
    memory = ", ".join(f"{name} {max(uss[name]):.0f}" for name in ("first step", "most", "end"))
    return (
        f"| {result['data']} | {result['ranks']} | {result['first_line_s']:.1f} | {result['first_step_s']:.1f} | "
        f"{result['first_step_cpu_s']:.1f} | {result['whole_s']:.1f} | {result['whole_cpu_s']:.1f} | "
        f"{result['steps_until_whole']} | {memory} |"
    )


def main() -> None:
    """Print a table, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
    parser.add_argument("--lines", type=int)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--forms", action="store_true", help="parquet, a folder and a list in place of one long file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="loading-"))
    shop = Workshop(folder, write_model(folder / "model"), folder)
    if options.forms:
        files, ranks = list(write_forms(folder, options.lines or 1_000_000).values()), options.ranks or [1]
    else:
        counts = (FEW, options.lines or 2_000_000)
        files, ranks = [write_lines(folder / f"{count}.jsonl", count) for count in counts], options.ranks or [1, 2]
    print(
        "| data | ranks | first line, s | first step, s | CPU s | whole table, s | CPU s | steps until then | ", end=""
    )
    print("USS of a rank, MiB |\n" + "|---" * 9 + "|")
    runs = []
    for number in ranks:
        for data in files:
            runs.append(measure(shop, f"{data.name}-on-{number}", data, number))
            print(row_of(runs[-1]), flush=True)
    about = {"date": datetime.date.today().isoformat(), **describe(1), "cores": os.cpu_count()}
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    key = "forms" if options.forms else "runs"
    RESULT.write_text(json.dumps({**known, **about, key: runs}, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

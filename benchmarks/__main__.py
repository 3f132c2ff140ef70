"""Run the named benchmarks, or all, print a table for each, and write benchmarks/results/NAME.json: `make bench`.

If that file holds results of another kind of processor, write NAME-PROCESSOR.json instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import mixtures, packing, resharding, speed, transport
from benchmarks.case import Case
from benchmarks.duel import OURS, Side, duel
from benchmarks.machine import fast_dtypes

RESULTS = Path("benchmarks/results")
RATES = Side("the machine", "rates_braid", {})
"""Measured in turn with the sides: the same work takes a machine longer at times."""
BENCHMARKS: dict[str, Callable[[], list[Case]]] = {
    "decode": speed.decode,
    "decode_vocabulary": speed.decode_vocabulary,
    "grpo": speed.grpo,
    "grpo_smollm2": speed.grpo_smollm2,
    "models": speed.models,
    "moe": mixtures.moe,
    "vision": speed.vision,
    "shared_prompt": speed.shared_prompt,
    "memory": speed.memory,
    "packing": packing.packing,
    "transport": transport.transport,
    "queue_control": transport.queue_control,
    "planning": resharding.planning,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="turns of each side; default: the case's")
    parser.add_argument("--profile", action="store_true", help="say where each side's time goes instead of comparing")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        if arguments.profile:
            profile(name, arguments.threads)
        else:
            run(name, arguments.threads, arguments.rounds)


def run(name: str, threads: int, rounds: int | None) -> None:
    """Run one benchmark. Results are written after each case, so that a long benchmark can be interrupted."""
    cases_of = cases_here(name)
    machine, today = described_machine(threads), datetime.date.today().isoformat()
    head = {"benchmark": name, "date": today, "machine": machine}
    cases: list[dict[str, Any]] = []
    for case in cases_of:
        load, turns, count = os.getloadavg()[0], rounds or case.rounds, case.threads or threads
        sides = [*case.sides, *([RATES] if case.needs_rates else [])]
        if case.at_once:
            found = duel(sides, turns, count)
        else:
            found = {side.name: duel([side], turns, count)[side.name] for side in sides}
        rates = found.pop(RATES.name, {})
        summary = case.summary(found, rates)
        print(f"\n{case.name}\n{case.table(summary)}", flush=True)
        about = {"threads": count, "rounds": turns, "load_before": round(load, 1), "rates": rates}
        cases.append({"case": case.name, **about, **summary})
        RESULTS.mkdir(exist_ok=True)
        result_file(name, machine).write_text(json.dumps({**head, "cases": cases}, indent=1) + "\n")


def cases_here(name: str) -> list[Case]:
    """Return a benchmark's cases, without the sides that would take this processor hours."""
    dtypes = fast_dtypes() or ["float32"]
    if "bfloat16" not in dtypes:
        print("without the sides in bfloat16, for which this processor has no units: they would take hours", flush=True)
    return [case.only(dtypes) for case in BENCHMARKS[name]()]


def result_file(name: str, machine: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Return the results file for this machine; results of another kind of processor are not overwritten."""
    file = folder / f"{name}.json"
    if not file.is_file() or kind(json.loads(file.read_text())["machine"]) == kind(machine):
        return file
    return folder / f"{name}-{kind(machine)}.json"


def kind(machine: Mapping[str, Any]) -> str:
    """Return a processor's name, family and widest vector unit as part of a file name."""
    words = re.sub(r"\(\w+\)", "", machine["processor"]).lower().split()
    return "-".join([*words, str(machine["family"]), *machine["vector_units"][-1:]])


def described_machine(threads: int) -> dict[str, Any]:
    """Return the machine's description by a process with as many threads as the sides have."""
    done = start(OURS, "benchmarks.machine", str(threads), threads=threads, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def profile(name: str, threads: int) -> None:
    """Print operators and functions by their own time, for Braid's sides and the peers' sides."""
    for case in cases_here(name):
        for side in case.sides:
            print(f"\n{case.name}: {side.name}", flush=True)
            count = case.threads or threads
            task = json.dumps({**side.case, "threads": count})
            start(side.python, "benchmarks.profiling", side.module, task, threads=count)


def start(
    python: Path, module: str, *arguments: str, threads: int, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a module in the environment of `python`."""
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": str(threads)}
    return subprocess.run([str(python), "-m", module, *arguments], check=True, env=environment, **settings)


if __name__ == "__main__":
    main()

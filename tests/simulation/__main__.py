"""Simulated streaming runs by the thousand, and faults planted in the code under test.

python -m tests.simulation --seeds 10000              every seed keeps all invariants
python -m tests.simulation --faults                   each planted fault is found, and shrunk to few events
python -m tests.simulation --seed 7                   one seed again; a failing one is shrunk first
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Iterable

from tests.simulation.faults import FAULTS, planted
from tests.simulation.run import Scenario, drawn, failure, shrunk

FAULT_SEEDS = 1_000
CHUNK = 20


def broken(seed: int) -> tuple[int, str]:
    """Return a seed, and what is broken in its run."""
    return seed, failure(drawn(seed))


def found(number: int) -> tuple[int, int | None, Scenario | None, str]:
    """Return the number of a planted fault, the first seed that finds it, its shortest scenario, and what it breaks."""
    with planted(FAULTS[number]):
        seed = next((seed for seed in range(FAULT_SEEDS) if failure(drawn(seed))), None)
        short = None if seed is None else shrunk(drawn(seed))
        return number, seed, short, "" if short is None else failure(short)


def collect_seldom() -> None:
    """Let a process of simulations look for garbage seldom: each look finds little, and takes a fifth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def run_seeds(seeds: Iterable[int], processes: int) -> int:
    """Run seeds and print what is broken; return the number of broken ones."""
    start, count, bad = time.monotonic(), 0, 0
    with multiprocessing.get_context("fork").Pool(processes, collect_seldom) as pool:
        for seed, trouble in pool.imap_unordered(broken, seeds, CHUNK):
            count += 1
            if trouble:
                bad += 1
                print(f"seed {seed}: {trouble}", flush=True)
    print(f"{count} seeds, {bad} broken, {time.monotonic() - start:.0f} s in {processes} processes")
    return bad


def run_faults(processes: int) -> int:
    """Find every planted fault, and print a table; return the number of faults that were not found."""
    print("| planted fault | first seed | events | after shrinking | what breaks |\n|---|---|---|---|---|")
    missed = 0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for number, seed, short, trouble in pool.imap(found, range(len(FAULTS))):
            what = str(FAULTS[number].__doc__).strip().splitlines()[0].removesuffix(".")
            if seed is None or short is None:
                missed += 1
                print(f"| {what} | not within {FAULT_SEEDS} | | | |", flush=True)
                continue
            events = len(drawn(seed).events), len(short.events)
            said = trouble.removeprefix("Broken: ").split(":")[0][:80]
            print(f"| {what} | {seed} | {events[0]} | {events[1]} | {said} |", flush=True)
    return missed


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.seed is not None:
        trouble = failure(drawn(options.seed))
        print(trouble or "every invariant holds")
        if trouble:
            print(shrunk(drawn(options.seed)))
        return bool(trouble)
    bad = run_seeds(range(options.first, options.first + options.seeds), options.processes) if options.seeds else 0
    return bool(bad + (run_faults(options.processes) if options.faults else 0))


if __name__ == "__main__":
    raise SystemExit(main())

"""`make bench`: runs the benchmarks, prints a table each, and writes benchmarks/results/NAME.json.

A benchmark whose results are there for this commit's files and machine is not run again without --again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.cases import BENCHMARKS, Case
from benchmarks.duel import OURS, duel

RESULTS = Path("benchmarks/results")
DONE = Path("build/bench-done")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="turns of each side; by default the case's")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--profile", action="store_true", help="say where Braid's time goes instead of comparing")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        if arguments.profile:
            profile(name, arguments.threads)
        else:
            run(name, arguments.threads, arguments.rounds, arguments.again)


def run(name: str, threads: int, rounds: int | None, again: bool) -> None:
    """One benchmark, case by case; a case that is done for the same sources is not run again."""
    machine = measured_machine(threads)
    results: dict[str, Any] = {
        "benchmark": name, "date": datetime.date.today().isoformat(), **machine, "cases": [],
    }  # fmt: skip
    for case in BENCHMARKS[name]():
        kept = DONE / f"{fingerprint(case, threads, rounds)}.json"
        if kept.exists() and not again:
            found = json.loads(kept.read_text())
        else:
            found = compared(case, measured(case, rounds or case.rounds, threads), machine["rates"])
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        print(table(case, found), flush=True)
        results["cases"].append(found)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def measured(case: Case, rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """All sides by turns; those whose memory is compared one after the other, so that they have the machine's."""
    if case.measure != "peak_mebibytes":
        return duel(case.sides, rounds, threads)
    return {side.name: duel([side], rounds, threads)[side.name] for side in case.sides}


def measured_machine(threads: int) -> dict[str, Any]:
    """In a process of its own, with the threads that the sides have."""
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [str(OURS), "-m", "benchmarks.machine", str(threads)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fingerprint(case: Case, threads: int, rounds: int | None) -> str:
    """Of the case and of the code that it runs."""
    digest = hashlib.sha256(repr((case.name, case.sides, threads, rounds)).encode())
    for path in sorted(
        [*Path("braidrl").rglob("*.py"), *Path("braidrl").rglob("*.c"), *Path("benchmarks").rglob("*.py")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def compared(case: Case, found: dict[str, dict[str, Any]], rates: dict[str, float]) -> dict[str, Any]:
    """The sides' numbers with the ratios that were aimed at and the part of the floor that each reached."""
    ratios = []
    for ours, theirs, goal in case.goals:
        ratio = found[ours][case.measure] / found[theirs][case.measure]
        ratio = 1 / ratio if case.measure == "peak_mebibytes" else ratio
        ratios.append(
            {"ours": ours, "theirs": theirs, "times": round(ratio, 2), "goal": goal, "reached": ratio >= goal}
        )
    if case.floor is not None:
        for side in case.sides:
            least = case.floor(side.case["dtype"], rates)
            found[side.name]["floor_seconds"] = least
            found[side.name]["fraction_of_floor"] = least / found[side.name]["seconds"]
    return {"case": case.name, "compared": case.measure, "sides": found, "ratios": ratios}


def table(case: Case, found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"\n{case.name}",
        f"  {'':24}{'tokens/s':>10}{'per CPU s':>10}{'seconds':>9}{'of floor':>9}{'peak MiB':>9}",
    ]
    for name, side in found["sides"].items():
        numbers = [("tokens_per_second", 10, ".0f"), ("tokens_per_cpu_second", 10, ".0f"), ("seconds", 9, ".2f"),
                   ("fraction_of_floor", 9, ".0%"), ("peak_mebibytes", 9, ".0f")]  # fmt: skip
        cells = (f"{format(side[key], form):>{width}}" if key in side else " " * width for key, width, form in numbers)
        lines.append(f"  {name:24}{''.join(cells)}")
    for ratio in found["ratios"]:
        mark = "" if ratio["reached"] else "   SHORT"
        lines.append(
            f"  {ratio['ours']} over {ratio['theirs']}: {ratio['times']:.2f} times, goal {ratio['goal']}{mark}"
        )
    return "\n".join(lines)


def profile(name: str, threads: int) -> None:
    """Operators by their own time, of Braid's sides."""
    for case in BENCHMARKS[name]():
        for side in case.sides:
            if side.python == OURS:
                print(f"\n{case.name}: {side.name}", flush=True)
                payload = json.dumps({**side.case, "threads": threads})
                environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": str(threads)}
                command = [str(OURS), "-m", "benchmarks.profiling", side.module, payload]
                subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()

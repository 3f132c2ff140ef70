"""Measure a device by a run (`braid plan --calibrate`), predict three placements of one configuration by these rates,
and run them.

    python -m benchmarks.planning.placements FOLDER [ROUNDS]

It writes benchmarks/results/plan_placements.json. The placements run in turns. It takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe
from benchmarks.planning.machine import (
    RESULTS,
    SPLIT,
    Case,
    configuration,
    distributed,
    hybrid,
    measured,
    train_apart,
    write_model,
)
from braidrl.cli.plan_command import observe
from braidrl.cluster.device_kinds import read_cluster
from braidrl.plan.configured import predicted
from braidrl.plan.rates import read_rates
from tests.tiny import sums, write_jsonl

PPO: dict[str, Any] = {"shape": "c", "prompts": 8, "flow": "ppo"}
PLACEMENTS = [
    Case("together", **PPO, settings=distributed()),
    Case("apart", **PPO, settings=hybrid(SPLIT)),
    Case("alone", **PPO),
]
"""All roles on both cores; actor on one and reference with critic on the other; all roles on one core."""


def main(root: Path, rounds: int) -> dict[str, Any]:
    """Measure, predict and run; return the table."""
    root.mkdir(parents=True, exist_ok=True)
    write_jsonl(root / "sums.jsonl", sums(80))
    write_model(root / "model-c", "c")
    files = {case.name: root / f"{case.name}.yaml" for case in PLACEMENTS}
    for case in PLACEMENTS:
        files[case.name].write_text(json.dumps(configuration(case, root)))
    rates = root / "rates.yaml"
    train_apart(files["alone"], "name=calibration")
    said = plan(root, "--calibrate", root / "calibration", "--rates", rates)
    seconds: dict[str, list[float]] = {case.name: [] for case in PLACEMENTS}
    guessed = {}
    for number in range(rounds):
        for case in PLACEMENTS:
            train_apart(files[case.name], f"name={case.name}-{number}")
            run = root / f"{case.name}-{number}"
            seconds[case.name].append(measured(run))
            steps = [problem for _, problem in observe(run, read_cluster("cpu")).steps()]
            guessed[case.name] = median(predicted(replace(one, rates=read_rates(rates))).seconds for one in steps)
    found = {name: {"measured_s": median(each), "predicted_s": guessed[name]} for name, each in seconds.items()}
    orders = [sorted(found, key=lambda name: found[name][key]) for key in ("measured_s", "predicted_s")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": describe(1),
        "cores": os.cpu_count(),
        "calibration": said,
        "placements": found,
        "same_order": orders[0] == orders[1],
        "best_plan": plan(
            root,
            files["alone"],
            "--devices",
            "cpu",
            "--rates",
            rates,
            "--lengths",
            root / "alone-0",
            "--overlay",
            root / "overlay.yaml",
        ),
    }


def plan(root: Path, *arguments: object) -> list[str]:
    """Run `braid plan` and return its lines, without those of the runs that it makes."""
    command = [sys.executable, "-m", "braidrl.cli", "plan", *map(str, arguments)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    lines = [line.rstrip().replace(str(root), "FOLDER") for line in done.stdout.splitlines()]
    return [line for line in lines if not line.startswith(("step ", "report:", "/"))]


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
    (RESULTS / "plan_placements.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))

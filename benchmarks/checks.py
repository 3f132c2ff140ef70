"""Benchmark of the safety checks: a training step with sandbox and watchdog, and a checkpoint with manifest; A B A B.

    python -m benchmarks.checks                         # on a quiet machine; writes benchmarks/results/checks.json
    python -m benchmarks.checks --rounds 1 --steps 3    # a smoke test; writes nothing

Steps: `reward.sandbox=none` and a watchdog that never checks, against the defaults. Each run starts from the same
model, which has imitated its teacher as in the demo; an untrained model would draw groups for a minute at each step.
Checkpoints: a model of 30 million parameters with its optimizer, with and without checksums, alternating in one
process, each until it is on disk. Takes some minutes: each round makes two runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.transitions import write_model
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving import checkpoints
from tests.tiny import TOKENIZER, Workshop, sums, write_jsonl

RESULT = Path("benchmarks/results/checks.json")
ARITHMETIC = Path("examples/arithmetic")
ROUNDS, STEPS, UNCOUNTED = 4, 6, 2
"""Rounds, steps of each run, and the number of first steps and checkpoints that only warm caches."""
WITHOUT = ("reward.sandbox=none", "cluster.silence_s=86400")
WITH = ("reward.sandbox=process", "cluster.silence_s=60")
PREPARE = """
import sys
from pathlib import Path
from demo import learn
learn(Path(sys.argv[1]), 0, 50, [], ["trainer.steps=1", "evaluation.every=0"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    given, started = parser.parse_args(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        steps = step_seconds(Path(place) / "arithmetic", given.rounds, given.steps)
        saved = checkpoint_seconds(Path(place) / "checkpoints", given.rounds)
    result = {
        "benchmark": "checks",
        "date": datetime.date.today().isoformat(),
        "rounds": given.rounds,
        "steps": given.steps,
        "seconds": round(time.perf_counter() - started),
        "step": compared(steps),
        "checkpoint": compared(saved),
    }
    if (given.rounds, given.steps) == (ROUNDS, STEPS):
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compared(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the medians of both sides, the relative cost of the checks, and every measured value."""
    without, checked = median(seconds["without"]), median(seconds["with"])
    return {"without_s": without, "with_s": checked, "added": checked / without - 1, "every": dict(seconds)}


def step_seconds(folder: Path, rounds: int, count: int) -> dict[str, list[float]]:
    """Return the median step time of each run, by side; the sides alternate."""
    subprocess.run([sys.executable, "-c", PREPARE, str(folder.resolve())], cwd=ARITHMETIC, check=True)
    found: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(rounds):
        for side, settings in (("without", WITHOUT), ("with", WITH)):
            name = f"{side}-{turn}"
            own = [
                f"name={name}",
                f"output={folder}",
                f"model={folder}/warm-start-model",
                f"data.train={folder}/train.jsonl",
                "data.eval={}",
                "evaluation.every=0",
                f"trainer.steps={count}",
                "trainer.checkpoint_every=0",
            ]
            command = [
                sys.executable,
                "-m",
                "braidrl.cli",
                "train",
                str(ARITHMETIC / "config.yaml"),
                *own,
                *settings,
            ]
            subprocess.run(command, check=True, capture_output=True)
            found[side].append(median(line["time/step"] for line in read_metrics(folder / name)[UNCOUNTED:]))
    return found


def checkpoint_seconds(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each checkpoint, by side; the sides alternate."""
    model = folder / "model"
    write_model(model)
    TOKENIZER.save_pretrained(model)
    workshop = Workshop(folder / "runs", model, write_jsonl(folder / "train.jsonl", sums(24)))
    found: dict[str, list[float]] = {"without": [], "with": []}
    with TrainingRun(workshop.config(trainer={"steps": 1}, trackers=[])) as run:
        run.train()
        checked = checkpoints.write_manifest
        sides: dict[str, Callable[[Path], None]] = {"without": lambda folder: None, "with": checked}
        for turn in range(rounds + UNCOUNTED):
            for side, write in sides.items():
                checkpoints.write_manifest = write  # type: ignore[assignment]
                started = time.perf_counter()
                run.checkpoints.save(run._snapshot(), run.backend)
                run.checkpoints.wait()
                if turn >= UNCOUNTED:  # The first checkpoints find no memory in the file system's cache.
                    found[side].append(time.perf_counter() - started)
        checkpoints.write_manifest = checked
    return found


if __name__ == "__main__":
    main()

"""`python -m examples.curriculum.demo`: sums of one to four digits, with and without a curriculum.

Prints the steps to a held-out score of 0.8 for each seed, some minutes each.

random model ──SFT on a teacher that errs on long numbers──▶ right half the time ──GRPO, two ways──▶ 0.8
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import train
from braidrl.runtimes.saving.checkpoints import export_model
from examples.arithmetic.task import work_out, write_jsonl, write_model

HERE = Path(__file__).parent
MISTAKES = {1: 0.05, 2: 0.3, 3: 0.7, 4: 0.9}
"""Share of the teacher's answers that are wrong, by digits."""
CURRICULUM = ["data.curriculum.name=gaussian", "data.curriculum.by=digits"]


def sums(count: int, seed: int, teacher: bool = False) -> Iterator[dict[str, Any]]:
    """Yield sums of numbers of one to four digits, as many of each."""
    source = random.Random(seed)
    for number in range(count):
        digits = 1 + number % len(MISTAKES)
        a, b = (source.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        errs = teacher and source.random() < MISTAKES[digits]
        response = {"response": work_out(a, b, source if errs else None)} if teacher else {}
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b), "digits": digits, **response}


def prepare(folder: Path, seed: int) -> None:
    """Write data and the warm-started model."""
    shutil.rmtree(folder, ignore_errors=True)
    write_jsonl(folder / "demonstrations.jsonl", sums(8000, seed, teacher=True))
    write_jsonl(folder / "train.jsonl", sums(8000, seed + 1000))
    write_jsonl(folder / "held_out.jsonl", sums(200, seed + 2000))
    write_model(folder / "untrained", seed)
    changes = [f"seed={seed}", "name=warm-start", f"output={folder}"]
    warm = train(
        load_config(
            HERE / "warm_start.yaml",
            [*changes, f"model={folder}/untrained", f"data.train={folder}/demonstrations.jsonl"],
        )
    )
    export_model(warm, folder / "model")


def steps_to_target(folder: Path, seed: int, name: str, curriculum: list[str]) -> tuple[int, list[float]]:
    """Train until the target, and return the steps and the scores."""
    changes = [
        f"seed={seed}",
        f"name={name}",
        f"output={folder}",
        f"model={folder}/model",
        f"data.train={folder}/train.jsonl",
    ]
    run = train(
        load_config(HERE / "config.yaml", [*changes, f"data.eval.held_out={folder}/held_out.jsonl", *curriculum])
    )
    scores = {line["step"]: line["eval/held_out/avg@4"] for line in read_metrics(run) if "eval/held_out/avg@4" in line}
    return max(scores), list(scores.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/curriculum"), help="its earlier contents are replaced"
    )
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        folder = arguments.folder / f"seed-{seed}"
        prepare(folder, seed)
        for name, curriculum in (("without", []), ("with", CURRICULUM)):
            steps, scores = steps_to_target(folder, seed, name, curriculum)
            print(f"seed {seed}, {name} curriculum: {scores[0]:.2f} to {scores[-1]:.2f} in {steps} steps", flush=True)


if __name__ == "__main__":
    main()

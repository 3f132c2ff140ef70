"""`python -m examples.coding_agent.demo`: train a model inside mini-swe-agent until its patches pass the tests.

random model ──SFT on a teacher that often takes any operator──▶ ──GRPO on mini-swe-agent's episodes──▶ tests pass
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from examples.coding_agent.task import FILE, FIX, MARKS, OPERATORS, SUBMIT, TEMPLATE, demonstrations, issue, issues
from examples.small_model import make_tokenizer, write_jsonl, write_model
from examples.two_stages import run_demo

DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . .\n"
"""The image of harbor's own providers; Braid's environment has the same files in the same folder."""


def prepare(folder: Path, seed: int) -> None:
    """Write data, the same issues as tasks of harbor, and an untrained model."""
    shutil.rmtree(folder, ignore_errors=True)
    examples = [issue(*problem) for problem in issues(160, seed)]
    write_jsonl(folder / "held_out.jsonl", examples[:32])
    write_jsonl(folder / "train.jsonl", examples[32:])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(1000, seed + 1))
    for number, example in enumerate(examples[32:]):
        write_task(folder / "tasks" / f"{number:03}", example)
    words = " ".join(["shell total of and must be their", *OPERATORS, *OPERATORS.values(), *map(str, range(10))])
    write_model(folder / "untrained", make_tokenizer([FIX, FILE, SUBMIT], words, TEMPLATE, MARKS), seed)


def write_task(folder: Path, example: dict[str, Any]) -> None:
    """Write an issue as a task of harbor."""
    tests = list(example["tests"])
    runs = " && ".join(f"PYTHONPATH=. python /tests/{name}" for name in tests)
    test = f"#!/bin/bash\n({runs}) && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    files = {f"environment/{name}": text for name, text in example["files"].items()}
    files |= {f"tests/{name}": text for name, text in example["tests"].items()} | {"tests/test.sh": test}
    files |= {"environment/Dockerfile": DOCKERFILE, "instruction.md": example["prompt"], "task.toml": "[environment]\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    run_demo(Path(__file__).parent, prepare, "eval/held_out/avg@2", "Solved issues")

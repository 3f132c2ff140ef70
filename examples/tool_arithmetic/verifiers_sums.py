"""Sums without tools, as an environment of the package `verifiers`: `rollout.environment=verifiers:FILE`."""

from __future__ import annotations

import random

import verifiers
from datasets import Dataset


def right(completion: list[dict[str, str]], answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment(count: int = 64, seed: int = 0) -> verifiers.Environment:
    source = random.Random(seed)
    sums = [(source.randrange(10), source.randrange(10)) for _ in range(count)]
    asked = [{"question": f"what is {a} plus {b}", "answer": str(a + b)} for a, b in sums]
    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(asked), rubric=verifiers.Rubric(funcs=[right]))

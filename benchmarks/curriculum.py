"""`python -m benchmarks.curriculum`: steps that sums of one to four digits take to be 0.8 right, by curriculum.

The policy is a table: for each column of a sum, logits over its results. GRPO trains it on whole sums, which are right
if all of their columns are. Prompts come from the loader's own admissions. A network would also share what it learns
between columns; this measures the choice of prompts alone, in seconds.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from braidrl.config import CurriculumConfig
from braidrl.data.curricula import CURRICULA, Curriculum, Units
from braidrl.data.loader import Admissions
from braidrl.data.rows import Rows

DIGITS, RESULTS, OF_LEVEL = 4, 19, 500
PROMPTS, SAMPLES, RATE, TARGET, MOST_STEPS = 32, 8, 4.0, 0.8, 2000
FIRST_RIGHT = 0.45
"""Probability of a right column at the start."""


def score_of(logits: np.ndarray, right: np.ndarray) -> float:
    """Return the exact mean score of sums with 1, 2, ... digits, whose columns are independent."""
    column = float(softmax(logits)[np.arange(len(right)), right].mean())
    return sum(column**digits for digits in range(1, DIGITS + 1)) / DIGITS


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def steps_to_target(name: str | None, seed: int) -> int:
    """Train until the target is reached; return the number of steps."""
    source = np.random.default_rng(seed)
    right = np.add.outer(np.arange(10), np.arange(10)).ravel()
    logits = source.normal(size=(len(right), RESULTS))
    logits[np.arange(len(right)), right] += np.log(FIRST_RIGHT / (1 - FIRST_RIGHT) * RESULTS)
    levels = np.repeat(np.arange(DIGITS), OF_LEVEL)
    sums = [source.integers(0, len(right), size=1 + level) for level in levels]
    curriculum = None
    if name is not None:
        units = Units(tuple(str(1 + level) for level in range(DIGITS)), levels)
        curriculum = Curriculum(CurriculumConfig(name=name, by="digits"), [units], seed, lag=1)
    admissions, order = Admissions([len(sums)], [1.0], seed, curriculum=curriculum), source.permutation(len(sums))
    for step in range(1, MOST_STEPS + 1):
        if score_of(logits, right) >= TARGET:
            return step - 1
        admissions.begin(step)
        numbers = admissions.advance(PROMPTS)
        drawn = [index for _, index in admissions.examples(numbers)] or [int(order[n % len(order)]) for n in numbers]
        change, scores = np.zeros_like(logits), []
        for index in drawn:
            columns = sums[index]
            probabilities = softmax(logits[columns])
            thrown = source.random((SAMPLES, len(columns), 1))
            said = (np.cumsum(probabilities, axis=-1)[None] < thrown).sum(axis=-1).clip(max=RESULTS - 1)
            reward = (said == right[columns]).all(axis=-1).astype(float)
            scores.append(reward)
            gradient = np.eye(RESULTS)[said] - probabilities[None]
            np.add.at(change, columns, np.einsum("s,scr->cr", reward - reward.mean(), gradient))
        logits += RATE * change / (PROMPTS * SAMPLES)
        flat = torch.tensor(np.concatenate(scores))
        group = torch.tensor(list(numbers)).repeat_interleave(SAMPLES)
        admissions.measure(step, Rows({"group": group, "score": flat, "finish_reason": torch.zeros_like(group)}))
    return MOST_STEPS


def main() -> None:
    for name in (None, *CURRICULA):
        steps = [steps_to_target(name, seed) for seed in range(3)]
        print(f"{name or 'none':10} {statistics.mean(steps):6.0f} steps on average: {', '.join(map(str, steps))}")


if __name__ == "__main__":
    main()

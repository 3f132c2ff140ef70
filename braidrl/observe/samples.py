"""The recorded responses in a report: the same held-out prompts over time, and the best and worst row of some steps."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from braidrl.data.records import whole_text
from braidrl.data.rows import FinishReason
from braidrl.observe.rollouts import (
    PROMPT_TEXT,
    RESPONSE_TEXT,
    evaluation_path,
    read_texts,
    recorded_evaluations,
    recorded_steps,
    rollout_path,
)

MOST_STEPS = 6
PROMPTS_PER_SET = 3
SHOWN_CHARACTERS = 4000
COLUMNS = ("score", "reward", "correct", "finish_reason", "metadata")


@dataclass(frozen=True)
class Sample:
    """One recorded row as text and numbers."""

    step: int
    prompt: str
    response: str
    score: float | None
    correct: bool | None
    finish_reason: str | None
    answer: str | None = None
    """The reference answer, as text."""


class SampleGroup(NamedTuple):
    """Samples shown together: all of one prompt, or, if the prompt is None, each with its own."""

    title: str
    samples: list[Sample]
    prompt: str | None = None


def sample_of(step: int, row: dict[str, Any]) -> Sample:
    """Convert a recorded row. The score is the verifier's if present, else the reward."""
    score = row.get("score", row.get("reward"))
    correct = row.get("correct")
    reason = row.get("finish_reason")
    named = None if reason is None else FinishReason(reason).name.lower()
    answer = json.loads(row.get("metadata") or "{}").get("answer")
    known = None if answer is None else whole_text(answer) if isinstance(answer, str) else json.dumps(answer)
    right = None if correct is None else bool(correct)
    return Sample(step, row[PROMPT_TEXT], row[RESPONSE_TEXT], score, right, named, known)


def read_samples(path: Path, step: int) -> list[Sample]:
    return [sample_of(step, row) for row in read_texts(path, COLUMNS)]


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` steps, evenly spread, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def over_time(run: Path, name: str) -> dict[str, list[Sample]]:
    """Return the first response at several steps, for the first few prompts of an evaluation set."""
    chosen: dict[str, list[Sample]] = {}
    for step in spread(recorded_steps(run, name), MOST_STEPS):
        found: dict[str, Sample] = {}
        for sample in read_samples(evaluation_path(run, name, step), step):
            found.setdefault(sample.prompt, sample)
        if not chosen:
            chosen = {prompt: [] for prompt in list(found)[:PROMPTS_PER_SET]}
        for prompt, samples in chosen.items():
            if prompt in found:
                samples.append(found[prompt])
    return chosen


def best_and_worst(samples: Sequence[Sample]) -> list[Sample]:
    """Return the rows with the highest and the lowest score; only one row if all scores are equal or missing."""
    if not samples:
        return []
    scores = [float("-inf") if sample.score is None else sample.score for sample in samples]
    return [samples[i] for i in dict.fromkeys((scores.index(max(scores)), scores.index(min(scores))))]


def samples_of_step(run: Path, step: int) -> list[dict[str, Any]]:
    """Return a step's samples for trackers: the best and worst training row, and the first prompts of each set evaluated then."""
    path = rollout_path(run, step)
    found: list[tuple[str, Sample]] = []
    if path.exists():
        found += [("training", sample) for sample in best_and_worst(read_samples(path, step))]
    for name in recorded_evaluations(run):
        if step in recorded_steps(run, name):
            found += [
                (name, sample) for sample in read_samples(evaluation_path(run, name, step), step)[:PROMPTS_PER_SET]
            ]
    return [{"step": step, "set": name, **asdict(sample)} for name, sample in found]


def sample_groups(run: Path) -> list[SampleGroup]:
    """Return the recorded responses for the report; empty if nothing was recorded."""
    groups = [
        SampleGroup(f"{name}: the same prompt over time", samples, prompt)
        for name in recorded_evaluations(run)
        for prompt, samples in over_time(run, name).items()
    ]
    for step in spread(recorded_steps(run), MOST_STEPS):
        chosen = best_and_worst(read_samples(rollout_path(run, step), step))
        groups += [SampleGroup(f"Training, step {step}", chosen)] if chosen else []
    return groups

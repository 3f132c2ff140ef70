"""Pairs of the model's own responses in which the shorter one is preferred, and a reward model trained on them.

questions ──model, 8 responses each──▶ shortest and longest of each ──▶ pairs ──┬─▶ DPO
                                                                                └─▶ reward model ──▶ PPO

A rule measures the length too (`checks.py:in_few_words`), so that the learned behaviour can be compared with the
preference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq

from braidrl.observe.rollouts import recorded_steps, rollout_path
from braidrl.runtimes.saving.checkpoints import export_model
from examples.smollm2.checks import words_of
from examples.smollm2.tasks import FOLDER, write

HERE = Path(__file__).parent
PAIRS, HELD_OUT_PAIRS, SCORER = (FOLDER / name for name in ("pairs.jsonl", "pairs_held_out.jsonl", "brevity-scorer"))
HELD_OUT = 24
"""Held-out pairs, which only measure the reward model's accuracy."""


def prepare() -> None:
    """Write the pairs and train the reward model, unless both are there."""
    if not PAIRS.is_file():
        pairs = list(pairs_of(drawn()))
        write(HELD_OUT_PAIRS, pairs[:HELD_OUT])
        write(PAIRS, pairs[HELD_OUT:])
    if not SCORER.is_dir():
        export_model(braid_train("brevity_reward.yaml", "brevity-reward"), SCORER, "reward")


def drawn() -> list[tuple[str, str]]:
    """Return each question with the untrained model's responses to it."""
    run = braid_train("brevity.yaml", "brevity-drawn", "data.eval={}", "evaluation.every=0", "--rollout-only")
    return [
        (question, text)
        for step in recorded_steps(run)
        for question, text, _ in recorded_responses(rollout_path(run, step))
    ]


def recorded_responses(path: Path) -> list[tuple[str, str, int]]:
    """Return question, last message, response and sample number of each row of a rollout file."""
    rows = pq.read_table(path, columns=["metadata", "response_text", "sample"]).to_pylist()
    asked = [json.loads(row["metadata"])["prompt"] for row in rows]
    questions = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in asked]
    return [(question, row["response_text"], row["sample"]) for question, row in zip(questions, rows, strict=True)]


def pairs_of(answered: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return each question's shortest response, preferred, and its longest one; questions whose responses are equally
    long are left out.
    """
    given: dict[str, list[str]] = defaultdict(list)
    for question, text in answered:
        if text.strip():
            given[question].append(text)
    pairs = []
    for question, texts in given.items():
        ordered = sorted(texts, key=words_of)
        if words_of(ordered[0]) < words_of(ordered[-1]):
            pairs.append({"prompt": question, "chosen": ordered[0], "rejected": ordered[-1], "answer": ""})
    return pairs


def braid_train(config: str, name: str, *more: str) -> Path:
    """Return the run folder of a configuration beside this file; the run is made unless it exists and has finished."""
    folder = FOLDER / name
    if not (folder / "done").is_file():
        command = [sys.executable, "-m", "braidrl.cli", "train", str(HERE / config), f"name={name}", *more]
        subprocess.run(command, check=True)
        (folder / "done").write_text(json.dumps(command[4:]))
    return folder

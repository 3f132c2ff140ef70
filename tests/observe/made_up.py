"""A small synthetic run for tests that read one."""

import math
from pathlib import Path
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import FinishReason, Objects, Rows
from braidrl.observe.metrics import REQUIRED_KEYS, MetricsWriter
from braidrl.observe.recorded_rows import write_rollouts
from braidrl.observe.rollouts import rollout_path

STAGES = ("actor.generate", "reward.verify", "actor.update")


def metrics_of(step: int) -> dict[str, Any]:
    """Return every required key, with numbers that rise or fall with the step."""
    learned = 1 - math.exp(-step / 15)
    wobble = math.sin(step * 12.9898) * 0.04
    metrics: dict[str, Any] = dict.fromkeys(REQUIRED_KEYS, 0.1 + 0.01 * step + wobble)
    metrics |= {"step": step, "version": step, "reward/mean": -0.4 + 1.3 * learned + wobble}
    metrics |= {"response/length_mean": 30 + 40 * learned, "actor/entropy": 1.4 * math.exp(-step / 20) + 0.1}
    metrics |= {"utilisation/operations/actor.update": 0.4, "memory/actor.update/reserved_max": 9e9}
    metrics |= {"weights/actor/update_seconds": 0.2}
    metrics |= {f"time/{stage}": 1.5 + abs(wobble) * 9 + i for i, stage in enumerate(STAGES)}
    return metrics


def before_training(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the line of an evaluation before the first step: the other metrics are null."""
    return {**dict.fromkeys(REQUIRED_KEYS), **metrics, "step": 0, "version": 0}


def rows_of(step: int, count: int = 4) -> Rows:
    """Return rows of two groups with tokens and scores."""
    numbers = torch.arange(count)
    tokens = Ragged.from_rows([list(range(i + 2)) for i in range(count)], torch.int64)
    return Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": numbers // 2,
            "sample": numbers % 2,
            "tokens": tokens,
            "score": (numbers % 2 * 2 - 1).to(torch.float32),
            "finish_reason": torch.full((count,), int(FinishReason.LENGTH if step % 2 else FinishReason.STOP)),
            "metadata": Objects(tuple({"answer": str(i)} for i in range(count))),
        }
    )


def make_run(folder: Path, steps: int = 20, response: str = "the answer is 7") -> Path:
    """Write a run folder with metrics, evaluations every five steps, and rollouts."""
    writer = MetricsWriter(folder)
    writer.write(before_training({"eval/test/avg@8": 0.31, "eval/test/pass@8": 0.6}))
    for step in range(1, steps + 1):
        result = {} if step % 5 else {"eval/test/avg@8": 0.31 + 0.55 * step / steps, "eval/test/pass@8": 0.9}
        writer.write(metrics_of(step) | result)
        rows = rows_of(step)
        texts = [f"{response} ({step})"] * len(rows)
        write_rollouts(rollout_path(folder, step), rows, [f"{step} + {g} = ?" for g in (1, 1, 2, 2)], texts)
        if step % 5 == 0:
            write_rollouts(rollout_path(folder, step, "test"), rows, ["2 + 5 = ?", "2 + 5 = ?", "a", "a"], texts)
    writer.close()
    (folder / "config.yaml").write_text("flow: dapo\nruntime: eager\n")
    return folder

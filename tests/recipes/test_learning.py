"""Recipes learn at a small size; `examples/arithmetic/studies.py` shows the same at a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model
from tests.recipes.tiny import make_config, write_data, write_decoder

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    write_decoder(folder / "model")
    write_data(folder)
    return folder


def write_pairs(path: Path, numbers: range) -> None:
    """The better response begins with an even digit."""
    lines = []
    for i in numbers:
        even, odd = 2 * (i % 5), 2 * (i // 5 % 5) + 1
        tail = f"{i * 7 % 10}{i * 3 % 10}"
        fields = {"prompt": f"{i % 7}+{i % 3}=", "chosen": f"{even}{tail}", "rejected": f"{odd}{tail}"}
        lines.append(json.dumps(fields))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.soak
def test_a_reward_model_learns_preferences_and_ppo_with_it_raises_the_true_score(folder: Path) -> None:
    write_pairs(folder / "pairs.jsonl", range(200))
    write_pairs(folder / "held_out.jsonl", range(200, 260))
    changes: dict[str, Any] = {
        "rollout__samples_per_prompt": 2,
        "data": {"train": str(folder / "pairs.jsonl"), "eval": {"pairs": str(folder / "held_out.jsonl")}},
        "trainer__steps": 30,
        "trainer__prompts_per_step": 32,
        "trainer__learning_rate": 3e-3,
        "evaluation__every": 30,
    }
    learned = train(make_config(folder, "reward_model", name="reward-model", **changes))
    accuracy = [
        line["eval/pairs/pair_accuracy"] for line in read_metrics(learned) if "eval/pairs/pair_accuracy" in line
    ]
    assert accuracy[0] == 0.0, "a new head gives equal scores"
    assert accuracy[-1] >= 0.9
    export_model(learned, folder / "reward", "reward")
    roles = {"reward": {"model": str(folder / "reward")}, "critic": {"model": str(folder / "reward")}}
    ppo = train(
        make_config(
            folder,
            "ppo",
            name="ppo",
            roles=roles,
            algorithm={"kl_coef": 0.01, "whiten": True, "value_clip": None},
            data={"train": str(folder / "data.jsonl"), "eval": {"true": str(folder / "data.jsonl")}},
            reward__verify=f"{HERE}/even.py:even",
            evaluation={"every": 25, "samples": 4},
            trainer__steps=25,
            trainer__prompts_per_step=8,
            trainer__learning_rate=3e-3,
        )
    )
    lines = read_metrics(ppo)
    score = [line["eval/true/avg@4"] for line in lines if line.get("eval/true/avg@4") is not None]
    assert score[-1] > max(0.9, score[0] + 0.2)
    assert lines[-1]["reward/mean"] > lines[1]["reward/mean"]


@pytest.mark.soak
def test_safe_rlhf_keeps_the_cost_that_reward_alone_would_drive_up(folder: Path) -> None:
    """The reward grows with the response's length, which is the cost; 36 steps show both turn."""
    lines = {}
    for name, rate, first in (("with", 0.005, 0.8), ("without", 0.0, 0.0)):
        algorithm = {
            "reward": "verify",
            "cost": f"{HERE}/limits.py:length_cost",
            "cost_limit": 6.0,
            "multiplier": first,
            "multiplier_learning_rate": rate,
            "kl_coef": 0.0,
            "lam": 1.0,
            "value_clip": None,
            "whiten": True,
            "entropy_coef": 0.05,
        }
        changes: dict[str, Any] = {
            "reward__verify": f"{HERE}/limits.py:sevens",
            "trainer__steps": 36 if rate else 10,
            "trainer__prompts_per_step": 8,
            "rollout__max_response_tokens": 16,
            "rollout__slots": 32,
            "trainer__learning_rate": 2e-3,
        }
        run = train(make_config(folder, "safe_rlhf", name=f"safe-{name}", algorithm=algorithm, **changes))
        lines[name] = read_metrics(run)
    free, held = lines["without"], lines["with"]
    assert free[-1]["cost/mean"] > 12
    multiplier = [line["advantage.safe_rlhf/multiplier"] for line in held]
    assert 0.8 < max(multiplier) < 1.5 and [line["advantage.safe_rlhf/multiplier"] for line in free] == [0.0] * len(
        free
    )
    costs = [line["cost/mean"] for line in held]
    assert fmean(costs[-8:]) < 7.0 < max(costs)
    assert fmean(line["reward/mean"] for line in held[-8:]) > held[0]["reward/mean"]

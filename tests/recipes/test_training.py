"""Every recipe trains end to end on a tiny model: two steps, with all of its models, data and metrics."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.flow.recipes import RECIPES
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from tests.recipes.tiny import (
    make_config,
    make_tokenizer,
    write_everything,
)

SCORED = {"reward": {"model": "scorer"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"rollout__samples_per_prompt": 1},
    "reward_model": {"rollout__samples_per_prompt": 2},
    "dpo": {"rollout__samples_per_prompt": 2},
    "ppo": {"roles": {**SCORED, "critic": {"model": "scorer", "learning_rate": 1e-2}}},
    "ppo_ptx": {"roles": SCORED, "data__ptx": "texts.jsonl"},
    "safe_rlhf": {
        "roles": {**SCORED, "cost": {"model": "scorer"}},
        "data__ptx": "texts.jsonl",
        "algorithm": {"ptx_coef": 0.5, "cost_limit": -0.5},
    },
    "vapo": {"algorithm": {"critic_warmup": 1}},
    "distillation": {"roles": {"reference": {"model": "teacher"}}},
    "dapo": {"algorithm": {"reward": {"verify": 1.0, "score": 0.1}, "dynamic_sampling": False}, "roles": SCORED},
    "reinforce_plus_plus": {"trainer__rows_per_update": 8},
    "gspo": {"trainer__rows_per_update": 8},
}
ALSO: list[tuple[str, dict[str, Any]]] = [
    ("reinforce_plus_plus", {"algorithm": {"baseline": True}}),
    ("reward_model", {"rollout__samples_per_prompt": 2, "algorithm": {"role": "cost"}}),
    ("ppo", {"algorithm": {"reward": "verify", "kl_target": 1.0, "whiten": True}}),
    (
        "grpo",
        {"algorithm": {"reward": {"score": 2.0, "style": 0.5}}, "roles": {**SCORED, "style": {"model": "scorer"}}},
    ),
    ("remax", {"algorithm": {"reward": "score"}, "roles": SCORED}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_everything(tmp_path_factory.mktemp("recipes"))


def placed(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes with file names turned into paths."""
    roles = {role: {**own, "model": str(folder / own["model"])} for role, own in changes.get("roles", {}).items()}
    texts = {"data__ptx": str(folder / changes["data__ptx"])} if "data__ptx" in changes else {}
    return {**changes, "roles": roles, **texts}


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, SETTINGS.get(name, {})) for name in RECIPES), *ALSO],
    ids=lambda value: str(value)[:40],
)
def test_recipe_trains_two_steps(name: str, changes: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run = train(make_config(folder, name, **placed(folder, changes), output=str(tmp_path)))
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    roles = {
        key.removeprefix("loss/")
        for line in lines
        for key, value in line.items()
        if key.startswith("loss/") and value is not None
    }
    assert roles == set(trained_roles(name, changes))
    for line in lines:
        for role in roles & {key.removeprefix("loss/") for key in line if line[key] is not None}:
            assert math.isfinite(line[f"loss/{role}"])
    grown = [line[f"{role}/grad_norm"] for line in lines for role in roles if f"{role}/grad_norm" in line]
    assert any(norm is not None and norm > 0 for norm in grown)
    for role in roles:
        assert (run / "checkpoints" / "step-2" / role / "model.safetensors").is_file()


def trained_roles(name: str, changes: dict[str, Any]) -> list[str]:
    if name == "reward_model":
        return [changes.get("algorithm", {}).get("role", "reward")]
    critics = {"ppo": 1, "ppo_ptx": 1, "vapo": 1, "safe_rlhf": 2}.get(name, 0)
    return ["actor", *["critic", "cost_critic"][:critics]]


def test_ptx_changes_the_actor_in_proportion_to_its_weight(folder: Path, tmp_path: Path) -> None:
    """A policy without a reward signal still learns the texts."""
    texts = {"data__ptx": str(folder / "texts.jsonl")}
    common = {"roles": placed(folder, {"roles": SCORED})["roles"], "trainer__steps": 8, "output": str(tmp_path)}
    algorithm = {"kl_coef": 0.0, "clip_low": 0.0, "clip_high": 0.0, "ptx_coef": 27.8}
    run = train(make_config(folder, "ppo_ptx", **common, **texts, algorithm=algorithm, name="ptx"))
    losses = [line["actor/ptx_loss"] for line in read_metrics(run)]
    assert losses[-1] < 0.7 * losses[0]


def test_several_rewards_are_columns_of_their_own_and_weighted_into_one(folder: Path, tmp_path: Path) -> None:
    changes = {"algorithm": {"reward": {"verify": 1.0, "score": 0.25, "style": -2.0}}}
    roles = placed(folder, {"roles": {**SCORED, "style": {"model": "scorer"}}})["roles"]
    run = train(make_config(folder, "rloo", **changes, roles=roles, output=str(tmp_path), trainer__steps=1))
    rows = read_rollouts(rollout_path(run, 1))
    expected = rows["correct"] + 0.25 * rows["reward_score"] - 2.0 * rows["style_score"]
    assert torch.allclose(rows["score"], expected, atol=1e-5)
    assert float(rows["reward_score"].std()) > 0


def test_remax_compares_with_one_greedy_response_per_prompt(folder: Path, tmp_path: Path) -> None:
    run = train(make_config(folder, "remax", output=str(tmp_path), trainer__steps=1))
    rows = read_rollouts(rollout_path(run, 1))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for i in range(len(rows)):
        prompt = rows["prompt"][i][None]
        with torch.no_grad():
            likeliest = model.generate(
                prompt, do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(prompt)
            )[0]
        assert rows["greedy.tokens"][i].tolist() == likeliest.tolist()
    assert torch.equal(rows["advantage"], rows["reward"] - rows["greedy.reward"])


@pytest.mark.parametrize("loss", [pytest.param("reinforce", marks=pytest.mark.soak), "dppo_tv"])
def test_several_updates_of_a_loss_without_old_log_probs_are_not_taken_for_a_wrong_engine(
    folder: Path, tmp_path: Path, loss: str
) -> None:
    def gaps(**changes: Any) -> list[float | None]:
        config = make_config(
            folder,
            "grpo",
            output=str(tmp_path),
            algorithm__loss=loss,
            trainer__learning_rate=3e-2,
            rollout__max_log_prob_gap=1e-4,
            **changes,
        )
        return [line["train/rollout_log_prob_gap"] for line in read_metrics(train(config))]

    assert all(gap is not None for gap in gaps(name="one"))
    assert gaps(name="several", trainer__rows_per_update=4) == [None, None]


@pytest.mark.soak
def test_multiplier_adapts_to_cost_is_reported_and_resumes(folder: Path, tmp_path: Path) -> None:
    roles = placed(folder, {"roles": {**SCORED, "cost": {"model": "scorer"}}})["roles"]
    algorithm = {"cost_limit": -1.0, "multiplier": 0.5, "multiplier_learning_rate": 0.2}
    common = {"roles": roles, "output": str(tmp_path), "algorithm": algorithm, "trainer__checkpoint_every": 2}
    whole = train(make_config(folder, "safe_rlhf", **common, trainer__steps=4, name="whole"))
    lines = read_metrics(whole)
    state = "advantage.safe_rlhf/multiplier"
    assert lines[0][state] == 0.5
    for before, after in itertools.pairwise(lines):
        rows = read_rollouts(rollout_path(whole, before["step"]))
        expected = max(0.0, before[state] + 0.2 * (float(rows["cost"].double().mean()) + 1.0))
        assert after[state] == pytest.approx(expected, rel=1e-5)
    first = train(make_config(folder, "safe_rlhf", **common, trainer__steps=2, name="half"))
    again = train(make_config(folder, "safe_rlhf", **common, trainer__steps=4, name="half"), resume=first)
    for line, other in zip(lines, read_metrics(again), strict=True):
        assert line[state] == other[state]
        assert line["loss/actor"] == pytest.approx(other["loss/actor"], rel=1e-4, abs=1e-6)


def test_metrics_include_the_ones_in_the_papers(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"reward": "verify", "correction": {"name": "truncated"}, "clip_low": 1e-3, "clip_high": 1e-3},
        "trainer__rows_per_update": 4,
        "trainer__learning_rate": 1e-2,
        "rollout__reflection_phrases": ["+", "="],
    }
    run = train(make_config(folder, "ppo", **changes, output=str(tmp_path)))
    rows, line = read_rollouts(rollout_path(run, 1)), read_metrics(run)[0]
    texts = [make_tokenizer().decode(row[mask]) for row, mask in zip(rows["tokens"], rows["action_mask"], strict=True)]
    assert line["response/reflections"] > 0
    assert line["response/reflections"] <= sum(text.count("+") + text.count("=") for text in texts) / len(texts)
    for low, high in (("low", "high"), ("high", "low")):
        assert 0 < line[f"actor/clip_fraction_{low}"] < line["actor/clip_fraction"], high
    assert line["actor/clip_fraction_low"] + line["actor/clip_fraction_high"] == pytest.approx(
        line["actor/clip_fraction"]
    )
    assert 0 < line["actor/clip_high_probability"] < line["actor/clip_high_probability_max"] <= 1
    assert line["actor/effective_sample_size"] == pytest.approx(1.0, abs=1e-4), (
        "engine and trainer have equal numerics here"
    )
    assert line["actor/kl_reference_k2"] > 0 and line["actor/kl_reference_k3"] > 0
    assert line["critic/explained_variance"] <= 1 and "critic/error_squared" not in line
    correct = rows["correct"].reshape(4, 4)
    assert line["groups/all_correct_fraction"] == float((correct.min(1).values == 1).double().mean())
    assert line["groups/all_wrong_fraction"] == float((correct.max(1).values == 0).double().mean())
    same = correct.min(1).values == correct.max(1).values
    assert line["groups/no_signal_fraction"] == float(same.double().mean())
    assert line["actor/entropy"] > 0

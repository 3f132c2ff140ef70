"""Held-out sets: given responses are evaluated as they are, and the best checkpoint by a metric is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidrl.cli.commands import app
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow, metrics_of_sets
from braidrl.runtimes.prepare.setup import prepare
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import best_checkpoint, run_config
from tests.tiny import Workshop, sums, write_jsonl

TRAINER: dict[str, Any] = {"steps": 1, "prompts_per_step": 2, "learning_rate": 1e-2, "checkpoint_every": 1}
EVALUATION = {"every": 1, "samples": 2}


def given(workshop: Workshop, flow: str, samples: int, **sections: Any) -> dict[str, Any]:
    """Return the last metrics of a run on pairs without answers, of which the first three are held out."""
    records = [
        {"prompt": one["prompt"], "chosen": one["response"], "response": one["response"], "rejected": "7"}
        for one in sums(9)
    ]
    data = {"train": str(write_jsonl(workshop.folder / "given.jsonl", records)), "held_out": 3}
    common = {"data": data, "rollout": {"samples_per_prompt": samples}, "reward": {"sandbox": "none"}}
    tree = {**common, "evaluation": EVALUATION, "trainer": TRAINER, "dtype": "float64"}
    tree = workshop.tree(flow, flow=flow, **{**tree, **sections})
    if "reward" not in sections:
        tree["reward"].pop("verify", None)
    path = workshop.folder / f"{flow}.yaml"
    path.write_text(json.dumps(tree))
    app(["train", str(path)], standalone_mode=False)
    return read_metrics(workshop.folder / flow)[-1]


def log_prob(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> float:
    """Return the log-prob of a response, by transformers."""
    both = torch.cat([prompt, response])
    with torch.no_grad():
        logits = model(both[None]).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, response[:, None]).sum())


def test_held_out_pairs_of_dpo_are_ranked_by_the_implied_reward(workshop: Workshop) -> None:
    result = given(workshop, "dpo", 2)
    path = workshop.folder / "dpo" / "checkpoints" / "step-1" / "actor"
    policy, before = (AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64) for m in (path, workshop.model))
    rows, margins = read_rollouts(rollout_path(workshop.folder / "dpo", 1, "held_out")), list[float]()
    for row in range(0, len(rows), 2):
        rewards = []
        for each in (row, row + 1):
            tokens, length = rows["tokens"][each], int(rows["prompt_length"][each])
            prompt, response = tokens[:length].long(), tokens[length:].long()
            rewards.append(log_prob(policy, prompt, response) - log_prob(before, prompt, response))
        margins.append(rewards[0] - rewards[1])
    assert len(margins) == 3
    assert result["eval/held_out/margin"] == pytest.approx(sum(margins) / 3, abs=1e-9)
    assert result["eval/held_out/pair_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)


def test_held_out_responses_of_sft_have_a_loss_per_token(workshop: Workshop) -> None:
    result = given(workshop, "sft", 1)
    model = AutoModelForCausalLM.from_pretrained(
        workshop.folder / "sft" / "checkpoints" / "step-1" / "actor", dtype=torch.float64
    )
    rows, total, count = read_rollouts(rollout_path(workshop.folder / "sft", 1, "held_out")), 0.0, 0
    for row in range(len(rows)):
        tokens, length = rows["tokens"][row].long(), int(rows["prompt_length"][row])
        total += log_prob(model, tokens[:length], tokens[length:])
        count += len(tokens) - length
    assert result["eval/held_out/loss"] == pytest.approx(-total / count, abs=1e-9)
    assert AutoTokenizer.from_pretrained(workshop.model).eos_token_id == int(rows["tokens"][0][-1])


def test_a_named_verifier_checks_generated_responses_of_held_out_prompts(workshop: Workshop) -> None:
    own = {"verify": f"{workshop.folder}/verifiers.py:starts_even", "sandbox": "none"}
    assert "eval/held_out/avg@2" in given(workshop, "sft", 1, reward=own)


def test_the_best_checkpoint_stays_beside_the_latest(workshop: Workshop) -> None:
    sections: dict[str, Any] = {
        "data": {"eval": {"set": str(workshop.data)}},
        "trainer": {**TRAINER, "steps": 3, "checkpoint_every": 0, "keep_checkpoints": 1},
        "evaluation": {"every": 1, "samples": 2, "best": "eval/set/score_mean", "max_prompts": 8},
    }
    run = workshop.run(**sections)
    written = {name for name in read_metrics(run)[0] if name.startswith("eval/")}
    config = run_config(run)
    assert written == set(metrics_of_sets(config, evaluation_flow(config, build_flow(config))))
    values = {line["step"]: line["eval/set/score_mean"] for line in read_metrics(run) if line["step"]}
    first_best = max(values, key=lambda step: (values[step], -step))
    best = best_checkpoint(run)
    assert best is not None and best.value == values[first_best]
    assert best.checkpoint == f"step-{first_best}"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        *("latest", "best.json", "step-3"),
        best.checkpoint,
    }
    app(["export", str(run), str(workshop.folder / "best"), "--best"], standalone_mode=False)
    assert (workshop.folder / "best" / "config.json").is_file()
    # A resumed run knows the value that is to beat.
    with TrainingRun(run_config(run, ["trainer.steps=4"]), resume=run) as resumed:
        resumed.train()
    after = read_metrics(run)[-1]["eval/set/score_mean"]
    again = best_checkpoint(run)
    assert again is not None and again.value == max(best.value, after)
    assert (run / "checkpoints" / again.checkpoint).is_dir()


def test_an_unknown_best_metric_ends_the_run_before_a_step(workshop: Workshop) -> None:
    evaluation = {"every": 1, "samples": 2, "best": "eval/set/accuracy"}
    config = workshop.config(data={"eval": {"set": str(workshop.data)}}, evaluation=evaluation)
    with pytest.raises(UserError, match=r"eval/set/accuracy.*avg@2") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)

"""Studies of learned rewards and of cost limits: a reward model with PPO, and Safe-RLHF."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from pages import Lines, curve, last_quarter, table
from study import HERE, Numbers, Study, Tree
from task import SYMBOLS, demonstrations, problems, questions, work_out, write_jsonl, write_model

from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.saving.checkpoints import export_model

HELD_OUT_PAIRS = 250
GARBLED = 24
"""Garbled texts per sum. A reward model that never saw such texts likes some of them, and PPO finds those."""
SCORER = "reward-model-exported"
LIMIT = 6.0
MARGIN = 0.5
"""The multiplier settles where the mean cost equals its limit.

This margin keeps noise from exceeding the real limit.
"""
MULTIPLIER = "advantage.safe_rlhf/multiplier"
CONSTRAINTS = {"Safe-RLHF": ("safe-rlhf-with", 0.5, 0.005), "no constraint": ("safe-rlhf-without", 0.0, 0.0)}
"""Name of the run, initial multiplier, and its learning rate."""


def preferences(seed: int) -> list[dict[str, str]]:
    """Return pairs of every two-digit sum against wrong answers: near misses, other numbers, another sum's working,
    garbled texts.
    """
    pairs, generator = [], random.Random(seed)
    for a, b in product(range(1, 10), repeat=2):
        right = a + b
        near = [n for n in (right - 2, right - 1, right + 1, right + 2) if n >= 0]
        far = [n for n in range(19) if n != right and n not in near]
        wrong = [f"{a}+{b}={n} #### {n}" for n in [*4 * near, *far]]
        wrong += [f"{a}+{b}={right} #### {n}" for n in [*near, *(f"{right}{digit}" for digit in range(10))]]
        wrong += [f"{x}+{y}={x + y} #### {x + y}" for x, y in ((a, b - 1), (a, b + 1), (a - 1, b), (a + 1, b))]
        wrong += [garbled(work_out(a, b), generator) for _ in range(GARBLED)]
        pairs += [{"prompt": f"{a}+{b}=", "chosen": work_out(a, b), "rejected": text} for text in wrong]
    generator.shuffle(pairs)
    return pairs


def garbled(text: str, generator: random.Random) -> str:
    """Return the text with one to three symbols dropped, doubled or replaced."""
    symbols = re.findall("####|.", text)
    for _ in range(generator.randint(1, 3)):
        place = generator.randrange(len(symbols))
        symbols[place] = generator.choice(["", 2 * symbols[place], generator.choice(SYMBOLS)])
    found = "".join(symbols)
    return found if found != text else garbled(text, generator)


def held_apart(pairs: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return held-out pairs, each once, and training pairs: near misses repeat, and no copy of a held-out pair may be
    among them.
    """
    held_out = {(pair["prompt"], pair["rejected"]): pair for pair in pairs[:HELD_OUT_PAIRS]}
    trained = [pair for pair in pairs if (pair["prompt"], pair["rejected"]) not in held_out]
    return list(held_out.values()), trained


def digits_model(study: Study) -> Path:
    """Return data files for sums of two digits, and a model that imitates a teacher with mistakes in half of the
    answers.
    """
    folder, model = study.folder / "digits", study.folder / "digits-model"
    sums = list(product(range(1, 10), repeat=2))
    held_out, trained = held_apart(preferences(seed=1))
    write_jsonl(folder / "sums.jsonl", questions(sums))
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(20 * sums, mistakes=0.5, seed=0))
    write_jsonl(folder / "pairs_held_out.jsonl", held_out)
    write_jsonl(folder / "pairs.jsonl", trained)
    if not model.is_dir():
        write_model(folder / "untrained", seed=0, layers=2, width=96)
        run = study.run(
            "digits-warm-start",
            {
                "flow": "sft",
                "model": str(folder / "untrained"),
                "data": {"train": str(folder / "demonstrations.jsonl")},
                "rollout": {"samples_per_prompt": 1, "max_response_tokens": 16},
                "trainer": {
                    "steps": 100,
                    "prompts_per_step": 128,
                    "learning_rate": 3e-3,
                    "schedule": "linear",
                    "warmup_steps": 10,
                    "checkpoint_every": 50,
                },
            },
        )
        export_model(run, model)
    return model


def reward_model(study: Study) -> Numbers:
    """Train a reward model from pairs, then PPO on its scores; the policy never sees the true score."""
    pairs, steps = scorer_run(study), read_metrics(policy_run(study))
    reward_model_page(study, pairs, steps)
    accuracy, score = curve(pairs, "eval/pairs/pair_accuracy"), curve(steps, "eval/sums/avg@4")
    return {"pair accuracy": accuracy[-1][1], "score before": score[0][1], "score after": score[-1][1]}


def scorer_run(study: Study) -> Lines:
    """Train the reward model, keep it in the study's folder, and return its metrics."""
    model, folder = str(digits_model(study)), study.folder / "digits"
    run = study.run(
        "reward-model",
        {
            "flow": "reward_model",
            "model": model,
            "data": {"train": str(folder / "pairs.jsonl"), "eval": {"pairs": str(folder / "pairs_held_out.jsonl")}},
            "rollout": {"samples_per_prompt": 2},
            "trainer": {
                "steps": 400,
                "prompts_per_step": 64,
                "learning_rate": 2e-3,
                "schedule": "linear",
                "warmup_steps": 10,
                "checkpoint_every": 100,
            },
            "evaluation": {"every": 40},
        },
    )
    if not (study.folder / SCORER).is_dir():
        export_model(run, study.folder / SCORER, "reward")
    return read_metrics(run)


def policy_run(study: Study) -> Path:
    """Train PPO with the reward model; return the run folder."""
    sums = str(study.folder / "digits" / "sums.jsonl")
    return study.run(
        "reward-model-ppo",
        {
            "flow": "ppo",
            "model": str(digits_model(study)),
            "reward": {"verify": "gsm8k"},
            "algorithm": {"kl_coef": 0.05, "lam": 1.0, "whiten": True, "value_clip": None},
            "roles": {"reward": {"model": str(study.folder / SCORER)}, "critic": {"learning_rate": 1e-3}},
            "data": {"train": sums, "eval": {"sums": sums}},
            "rollout": {"samples_per_prompt": 8, "max_response_tokens": 16, "slots": 256},
            "trainer": {
                "steps": 250,
                "prompts_per_step": 32,
                "rows_per_update": 64,
                "learning_rate": 2e-4,
                "checkpoint_every": 50,
            },
            "evaluation": {"every": 10, "samples": 4, "top_p": 1.0},
        },
    )


def reward_model_page(study: Study, pairs: Lines, steps: Lines) -> None:
    accuracy, score = curve(pairs, "eval/pairs/pair_accuracy"), curve(steps, "eval/sums/avg@4")
    learned = [line["reward/mean"] for line in steps if line.get("reward/mean") is not None]
    held_out = len((study.folder / "digits" / "pairs_held_out.jsonl").read_text().splitlines())
    text = (
        "The reward model trains on pairs of a right and a wrong answer to a sum of two digits (Bradley-Terry, "
        f"{pairs[-1]['step']} steps of 64 pairs). No pair equals one of the {held_out} held-out pairs. Then PPO "
        "trains the policy. Its "
        "critic starts as the policy with a new head. The only reward is the reward model's; the share of right "
        "answers, over all 81 "
        "sums, is only measured.\n\n"
        + table(
            ["", "before", "after"],
            [
                ["held-out pairs ranked correctly", f"{accuracy[0][1]:.2f}", f"{accuracy[-1][1]:.2f}"],
                ["learned reward of the responses", f"{learned[0]:.2f}", f"{learned[-1]:.2f}"],
                ["sums answered right (avg@4)", f"{score[0][1]:.2f}", f"{score[-1][1]:.2f}"],
            ],
        )
        + "\nBefore training, a new head gives every answer the same score.\n\n"
        + study.curves(
            "reward-model-accuracy", "Held-out pair accuracy by step of the reward model", {"accuracy": accuracy}
        )
        + study.curves("reward-model-ppo", "Sums answered right by step of PPO", {"avg@4": score})
    )
    study.page("reward-model", "A reward model, and PPO with it", text)


def safe_rlhf(study: Study) -> Numbers:
    """Train with a reward for more symbols and a limit on the mean length, with and without the multiplier."""
    lines = {name: read_metrics(limited_run(study, *constraint)) for name, constraint in CONSTRAINTS.items()}
    safe_rlhf_page(study, lines)
    held, free = lines["Safe-RLHF"], lines["no constraint"]
    recent = [line[MULTIPLIER] for line in held[-len(held) // 4 :]]
    return {
        "limit": LIMIT,
        "cost": last_quarter(held, "cost/mean"),
        "cost without a constraint": last_quarter(free, "cost/mean"),
        "reward before": held[0]["reward/mean"],
        "reward after": last_quarter(held, "reward/mean"),
        "spread of the multiplier": max(recent) - min(recent),
    }


def limited_run(study: Study, name: str, multiplier: float, learning_rate: float) -> Path:
    """Train with an initial multiplier and its learning rate; return the run folder."""
    functions, model, sums = HERE / "limits.py", study.folder / "small", study.folder / "sums.jsonl"
    if not model.is_dir():
        write_model(model, seed=0, layers=2, width=64)
        write_jsonl(sums, questions(problems(60, 1, seed=0)))
    algorithm: Tree = {
        "reward": "verify",
        "kl_coef": 0.0,
        "lam": 1.0,
        "value_clip": None,
        "whiten": True,
        "entropy_coef": 0.2,
        "cost": f"{functions}:length_cost",
        "cost_limit": LIMIT - MARGIN,
        "multiplier": multiplier,
        "multiplier_learning_rate": learning_rate,
    }
    return study.run(
        name,
        {
            "flow": "safe_rlhf",
            "algorithm": algorithm,
            "model": str(model),
            "data": {"train": str(sums)},
            "reward": {"verify": f"{functions}:sevens"},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 16, "slots": 64},
            "trainer": {"steps": 240, "prompts_per_step": 16, "learning_rate": 1e-3, "checkpoint_every": 40},
            "roles": {role: {"learning_rate": 3e-3} for role in ("critic", "cost_critic")},
        },
    )


def safe_rlhf_page(study: Study, lines: Mapping[str, Lines]) -> None:
    costs, rewards = (
        {name: curve(found, key) for name, found in lines.items()} for key in ("cost/mean", "reward/mean")
    )
    text = (
        "The reward is 4·√(sevens in the response). The cost is the response's length in tokens, and the limit is a "
        f"mean cost of {LIMIT:g}. Responses may have 16 tokens, and the reward alone is highest at 16. The "
        "multiplier settles where the "
        f"mean cost equals its limit. Its limit is therefore {MARGIN:g} lower.\n\n"
        + table(
            ["", "reward, first step", "reward, last quarter", "cost, last quarter", "multiplier, last quarter"],
            [
                [
                    name,
                    f"{found[0]['reward/mean']:.2f}",
                    f"{last_quarter(found, 'reward/mean'):.2f}",
                    f"{last_quarter(found, 'cost/mean'):.2f}",
                    f"{last_quarter(found, MULTIPLIER):.2f}",
                ]
                for name, found in lines.items()
            ],
        )
        + "\n"
        + study.curves("safe-rlhf-cost", "Mean cost (limit dashed)", costs, LIMIT)
        + study.curves("safe-rlhf-reward", "Mean reward", rewards)
        + study.curves("safe-rlhf-multiplier", "Multiplier", {"λ": curve(lines["Safe-RLHF"], MULTIPLIER)})
    )
    study.page("safe-rlhf", "Safe-RLHF", text)

"""Studies of learned rewards and of limits: a reward model and PPO with it, and Safe-RLHF."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

from study import HERE, Lines, Numbers, Study, curve, last_quarter, table
from task import demonstrations, problems, questions, work_out, write_jsonl, write_model

from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.export import export_model

HELD_OUT_PAIRS = 200
MARGIN = 0.1
"""The multiplier settles where the mean cost equals its limit; so much below the one to be kept, noise does not break it."""


def preferences(seed: int) -> list[dict[str, str]]:
    """Every sum of two digits against wrong answers: near misses, other numbers, a digit too many, another sum's working."""
    pairs = []
    for a, b in product(range(1, 10), repeat=2):
        right = a + b
        near = [n for n in (right - 2, right - 1, right + 1, right + 2) if n >= 0]
        far = [n for n in range(19) if n != right and n not in near]
        wrong = [f"{a}+{b}={n} #### {n}" for n in [*4 * near, *far]]
        wrong += [f"{a}+{b}={right} #### {n}" for n in [*near, *(f"{right}{digit}" for digit in range(10))]]
        wrong += [f"{x}+{y}={x + y} #### {x + y}" for x, y in ((a, b - 1), (a, b + 1), (a - 1, b), (a + 1, b))]
        pairs += [{"prompt": f"{a}+{b}=", "chosen": work_out(a, b), "rejected": text} for text in wrong]
    random.Random(seed).shuffle(pairs)
    return pairs


def digits_model(study: Study) -> Path:
    """Data files for sums of two digits, and a model that imitates a teacher who errs in half of them."""
    folder, model = study.folder / "digits", study.folder / "digits-model"
    sums, pairs = list(product(range(1, 10), repeat=2)), preferences(seed=1)
    write_jsonl(folder / "sums.jsonl", questions(sums))
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(20 * sums, mistakes=0.5, seed=0))
    write_jsonl(folder / "pairs_held_out.jsonl", pairs[:HELD_OUT_PAIRS])
    write_jsonl(folder / "pairs.jsonl", pairs[HELD_OUT_PAIRS:])
    if not model.is_dir():
        write_model(folder / "untrained", seed=0, layers=2, width=96)
        run = study.run("digits-warm-start", {
            "flow": "sft", "model": str(folder / "untrained"), "data": {"train": str(folder / "demonstrations.jsonl")},
            "rollout": {"samples_per_prompt": 1, "max_response_tokens": 16},
            "trainer": {"steps": 100, "prompts_per_step": 128, "learning_rate": 3e-3, "schedule": "linear",
                        "warmup_steps": 10, "checkpoint_every": 50},
        })  # fmt: skip
        export_model(run, model)
    return model


def reward_model(study: Study) -> Numbers:
    """A reward model from pairs, then PPO on what it says; the true score is never shown to the policy."""
    model, folder = str(digits_model(study)), study.folder / "digits"
    learned = study.run("reward-model", {
        "flow": "reward_model", "model": model,
        "data": {"train": str(folder / "pairs.jsonl"), "eval": {"pairs": str(folder / "pairs_held_out.jsonl")}},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"steps": 400, "prompts_per_step": 64, "learning_rate": 2e-3, "schedule": "linear",
                    "warmup_steps": 10, "checkpoint_every": 100},
        "evaluation": {"every": 40},
    })  # fmt: skip
    scorer = study.folder / "reward-model-exported"
    if not scorer.is_dir():
        export_model(learned, scorer, "reward")
    roles = {"reward": {"model": str(scorer)}, "critic": {"learning_rate": 1e-3}}
    algorithm = {"kl_coef": 0.05, "lam": 1.0, "whiten": True, "value_clip": None}
    ppo = study.run("reward-model-ppo", {
        "flow": "ppo", "algorithm": algorithm, "model": model, "roles": roles, "reward": {"verify": "gsm8k"},
        "data": {"train": str(folder / "sums.jsonl"), "eval": {"sums": str(folder / "sums.jsonl")}},
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": 16, "slots": 256},
        "trainer": {"steps": 250, "prompts_per_step": 32, "rows_per_update": 64, "learning_rate": 4e-4, "checkpoint_every": 50},
        "evaluation": {"every": 10, "samples": 4, "top_p": 1.0},
    })  # fmt: skip
    pairs, steps = read_metrics(learned), read_metrics(ppo)
    accuracy, score = curve(pairs, "eval/pairs/pair_accuracy"), curve(steps, "eval/sums/avg@4")
    text = (
        "# A reward model, and PPO with it\n\nPairs of one right and one wrong answer to a sum of two digits train a reward model "
        f"(Bradley-Terry, {pairs[-1]['step']} steps of 64 pairs, none of them among the {HELD_OUT_PAIRS} held-out ones). PPO then "
        "trains the policy, with a critic that begins as the policy with a fresh head; the reward model alone rewards it, and the share "
        "of right answers is only watched.\n\n"
        + table(
            ["", "before", "after"],
            [
                ["held-out pairs told apart", f"{accuracy[0][1]:.2f}", f"{accuracy[-1][1]:.2f}"],
                [
                    "learned reward of the responses",
                    f"{steps[1]['reward/mean']:.2f}",
                    f"{steps[-1]['reward/mean']:.2f}",
                ],
                ["sums answered right (avg@4)", f"{score[0][1]:.2f}", f"{score[-1][1]:.2f}"],
            ],
        )
        + "\n"
        + study.curves(
            "reward-model-accuracy", "Held-out pair accuracy by step of the reward model", {"accuracy": accuracy}
        )
        + study.curves("reward-model-ppo", "Sums answered right by step of PPO", {"avg@4": score})
        + "\nRun it: `python examples/arithmetic/studies.py reward-model`\n"
    )
    study.page("reward-model", text)
    return {"pair accuracy": accuracy[-1][1], "score before": score[0][1], "score after": score[-1][1]}


def safe_rlhf(study: Study) -> Numbers:
    """Reward for more symbols, a limit for the mean length: with the multiplier, and without it."""
    limit, functions = 6.0, HERE / "limits.py"
    if not (study.folder / "small").is_dir():
        write_model(study.folder / "small", seed=0, layers=2, width=64)
        write_jsonl(study.folder / "sums.jsonl", questions(problems(60, 1, seed=0)))
    common = {"reward": "verify", "kl_coef": 0.0, "lam": 1.0, "value_clip": None, "whiten": True, "entropy_coef": 0.05}
    critics = {role: {"learning_rate": 3e-3} for role in ("critic", "cost_critic")}
    lines: dict[str, Lines] = {}
    for name, rate, first in (("Safe-RLHF", 0.005, 0.5), ("no constraint", 0.0, 0.0)):
        algorithm = {
            **common, "cost": f"{functions}:length_cost", "cost_limit": limit - MARGIN,
            "multiplier": first, "multiplier_learning_rate": rate,
        }  # fmt: skip
        run = study.run(f"safe-rlhf-{'with' if rate else 'without'}", {
            "flow": "safe_rlhf", "algorithm": algorithm, "model": str(study.folder / "small"),
            "data": {"train": str(study.folder / "sums.jsonl")},
            "reward": {"verify": f"{functions}:sevens"},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 16, "slots": 64},
            "trainer": {"steps": 240, "prompts_per_step": 16, "learning_rate": 2e-3, "checkpoint_every": 40},
            "roles": critics,
        })  # fmt: skip
        lines[name] = read_metrics(run)
    multiplier = "advantage.safe_rlhf/multiplier"
    text = (
        "# Safe-RLHF\n\nThe reward is 4·√(sevens in the response), the cost is the response's length in tokens, and the limit is a "
        f"mean cost of {limit:g}; responses may have 16 tokens. The best response for the reward alone has 16. The multiplier "
        f"settles where the mean cost equals its limit, so it is given one {MARGIN:g} lower.\n\n"
        + table(
            ["", "reward, first step", "reward, last quarter", "cost, last quarter", "multiplier, last quarter"],
            [
                [name, f"{found[0]['reward/mean']:.2f}", f"{last_quarter(found, 'reward/mean'):.2f}",
                 f"{last_quarter(found, 'cost/mean'):.2f}", f"{last_quarter(found, multiplier):.2f}"]
                for name, found in lines.items()
            ],
        )
        + "\n"
        + study.curves("safe-rlhf-cost", "Mean cost (limit dashed)", {n: curve(f, "cost/mean") for n, f in lines.items()}, limit)
        + study.curves("safe-rlhf-reward", "Mean reward", {n: curve(f, "reward/mean") for n, f in lines.items()})
        + study.curves("safe-rlhf-multiplier", "Multiplier", {"λ": curve(lines["Safe-RLHF"], multiplier)})
        + "\nRun it: `python examples/arithmetic/studies.py safe-rlhf`\n"
    )  # fmt: skip
    study.page("safe-rlhf", text)
    held, free = lines["Safe-RLHF"], lines["no constraint"]
    recent = [line[multiplier] for line in held[-len(held) // 4 :]]
    return {
        "limit": limit,
        "cost": last_quarter(held, "cost/mean"),
        "cost without a constraint": last_quarter(free, "cost/mean"),
        "reward before": held[0]["reward/mean"],
        "reward after": last_quarter(held, "reward/mean"),
        "spread of the multiplier": max(recent) - min(recent),
    }

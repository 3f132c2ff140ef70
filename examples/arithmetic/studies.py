"""What the recipes do on tasks that a CPU can train: each study is a few runs and a page with their curves.

reward-model    a reward model from preference pairs, then PPO with a critic and that reward model
safe-rlhf       a task whose best answer breaks the cost limit
algorithms      seven recipes from the same start, over three seeds
ablation        GRPO, and DAPO's techniques added to it one after the other

A run that is done is not repeated, one that was interrupted goes on: call the same study again.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from curves import Curve, write_curves
from task import demonstrations, problems, questions, work_out, write_jsonl, write_model

from braidrl.config import Config, parse_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.export import export_model
from braidrl.runtimes.folders import latest_checkpoint, run_config
from braidrl.runtimes.run import train

HERE = Path(__file__).parent
HELD_OUT, TRAINED, DIGITS = 100, 4000, 2
SCORE = "eval/held_out/avg@4"
SEEDS = (0, 1, 2)
STEPS = 24
HELD_OUT_PAIRS = 200
MARGIN = 0.1
"""The multiplier settles where the mean cost equals its limit; so much below the one to be kept, noise does not break it."""

Lines = list[dict[str, Any]]
Tree = dict[str, Any]
Numbers = dict[str, float]
"""What a study found, by name."""


class Study:
    """The folder of a study's data and runs, and the pages that it writes."""

    def __init__(self, folder: Path, pages: Path, quick: bool = False) -> None:
        """`quick` makes every run a few steps long: it shows that the study works, and nothing about algorithms."""
        self.folder, self.pages, self.quick = folder, pages, quick

    def run(self, name: str, tree: Mapping[str, Any]) -> Path:
        """The run folder of a finished run: done before, gone on with, or begun."""
        config = parse_config({**self.shortened(tree), "name": name, "output": str(self.folder), "device": "cpu"})
        folder = self.folder / name
        if finished(folder, config):
            return folder
        if folder.is_dir() and latest_checkpoint(folder):
            return train(run_config(folder), resume=folder)
        shutil.rmtree(folder, ignore_errors=True)
        return train(config)

    def shortened(self, tree: Mapping[str, Any]) -> Tree:
        trainer = dict(tree["trainer"])
        if self.quick:
            trainer |= {"steps": 2, "prompts_per_step": 8, "warmup_steps": 0}
        evaluation = dict(tree.get("evaluation", {"every": 0}))
        if self.quick and evaluation.get("every"):
            evaluation |= {"every": 2, "max_prompts": 8}
        return {**tree, "trainer": trainer, "evaluation": evaluation}

    def page(self, name: str, text: str) -> None:
        self.pages.mkdir(parents=True, exist_ok=True)
        (self.pages / f"{name}.md").write_text(text)

    def curves(self, name: str, title: str, curves: Mapping[str, Curve], limit: float | None = None) -> str:
        """Draws curves beside the page; returns how the page shows them."""
        write_curves(self.pages / f"{name}.svg", title, curves, limit)
        return f"![{title}]({name}.svg)\n"

    def warm_model(self) -> Path:
        """Data files, and the model that every study begins with: one that imitates a careless teacher."""
        folder = self.folder / "warm-start-model"
        if not (self.folder / "train.jsonl").is_file():
            self.write_data()
        if folder.is_dir():
            return folder
        write_model(self.folder / "untrained", seed=0)
        run = self.run("warm-start", {
            "flow": "sft", "model": str(self.folder / "untrained"),
            "data": {"train": str(self.folder / "demonstrations.jsonl")},
            "rollout": {"samples_per_prompt": 1, "max_response_tokens": 32},
            "trainer": {"steps": 200, "prompts_per_step": 256, "learning_rate": 3e-3, "schedule": "linear",
                        "warmup_steps": 20, "checkpoint_every": 50},
        })  # fmt: skip
        export_model(run, folder)
        return folder

    def write_data(self) -> None:
        """Sums to train on, held-out ones, and a careless teacher's answers."""
        pairs = problems(HELD_OUT + TRAINED, DIGITS, seed=0)
        held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT:]
        write_jsonl(self.folder / "held_out.jsonl", questions(held_out))
        write_jsonl(self.folder / "train.jsonl", questions(trained))
        write_jsonl(self.folder / "demonstrations.jsonl", demonstrations(trained, mistakes=0.5, seed=0))

    def policy(self, flow: str, algorithm: Tree, seed: int = 0, **more: Any) -> Tree:
        """A run that improves the warm model on sums, evaluated on held-out ones."""
        tree: Tree = {
            "flow": flow, "algorithm": algorithm, "seed": seed, "model": str(self.warm_model()),
            "data": {"train": str(self.folder / "train.jsonl"), "eval": {"held_out": str(self.folder / "held_out.jsonl")}},
            "reward": {"verify": "gsm8k"},
            "rollout": {"samples_per_prompt": 8, "max_response_tokens": 40, "slots": 128},
            "trainer": {"steps": STEPS, "prompts_per_step": 16, "learning_rate": 3e-4, "checkpoint_every": 6},
            "evaluation": {"every": 6, "samples": 4, "top_p": 1.0},
        }  # fmt: skip
        return {**tree, **more}


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


def finished(folder: Path, config: Config) -> bool:
    """True if the run has done all its steps and kept its models."""
    if latest_checkpoint(folder) is None:
        return False
    return bool(read_metrics(folder)[-1]["step"] >= config.trainer.steps)


def curve(lines: Lines, key: str) -> Curve:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def last_quarter(lines: Lines, key: str) -> float:
    """Mean over the last quarter of the steps."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return fmean(values[-max(1, len(values) // 4) :])


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


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
        "trainer": {"steps": 75, "prompts_per_step": 32, "rows_per_update": 64, "learning_rate": 4e-4, "checkpoint_every": 25},
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


RECIPES: dict[str, tuple[str, Tree]] = {
    "ReMax": ("remax", {"kl_coef": 0.0}),
    "GRPO": ("grpo", {"kl_coef": 0.0}),
    "RLOO": ("rloo", {"kl_coef": 0.0}),
    "REINFORCE++": ("reinforce_plus_plus", {"kl_coef": 0.0}),
    "DAPO": ("dapo", {"overlong_cache": 8}),
    "GSPO": ("gspo", {}),
    "CISPO": ("cispo", {}),
}


def algorithms(study: Study) -> Numbers:
    """Seven recipes from the same start, over the seeds."""
    rows, curves = [], {}
    for name, (flow, algorithm) in RECIPES.items():
        runs = [read_metrics(study.run(f"{flow}-{seed}", study.policy(flow, algorithm, seed))) for seed in SEEDS]
        finals = [curve(lines, SCORE)[-1][1] for lines in runs]
        rows.append([
            name, f"{fmean(finals):.3f}", " ".join(f"{final:.2f}" for final in finals), runs[0][-1]["step"],
            f"{fmean(generated(lines) for lines in runs):,.0f}", f"{fmean(seconds(lines) for lines in runs):.0f}",
        ])  # fmt: skip
        steps = [step for step, _ in curve(runs[0], SCORE)]
        curves[name] = [(s, fmean(dict(curve(lines, SCORE))[s] for lines in runs)) for s in steps]
    header = ["recipe", "held-out avg@4, mean of seeds", "each seed", "steps", "tokens generated", "seconds"]
    start = next(iter(curves.values()))[0][1]
    text = (
        f"# Seven recipes on sums\n\nAll begin with the same model, which answers {start:.0%} of the held-out sums right, and train on "
        "16 prompts with 8 responses per step.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("algorithms", "Held-out avg@4, mean of the seeds", curves)
        + "\nRun it: `python examples/arithmetic/studies.py algorithms`\n"
    )
    study.page("algorithms", text)
    return {"start": start, **{name: points[-1][1] for name, points in curves.items()}}


def generated(lines: Lines) -> float:
    """Response tokens sampled for training."""
    return float(sum(line["tokens/generated"] or 0 for line in lines))


def seconds(lines: Lines) -> float:
    return float(sum(line["time/step"] or 0 for line in lines))


PLAIN: Tree = {
    "aggregate": "seq-mean-token-mean", "clip_high": 0.2, "overlong_cache": 0, "dynamic_sampling": False,
}  # fmt: skip
ADDED: tuple[tuple[str, Tree], ...] = (
    ("GRPO", {}),
    ("+ overlong filtering", {"overlong_filter": True}),
    ("+ Clip-Higher", {"clip_high": 0.28}),
    ("+ soft overlong punishment", {"overlong_cache": 8, "overlong_filter": False}),
    ("+ token-level loss", {"aggregate": "token-mean"}),
    ("+ dynamic sampling (DAPO)", {"dynamic_sampling": True}),
)


def ablation(study: Study) -> Numbers:
    """DAPO's table: each row adds a technique to the one above it."""
    algorithm, found = dict(PLAIN), {}
    trainer = {
        "steps": STEPS, "prompts_per_step": 16, "rows_per_update": 32, "learning_rate": 2e-4, "checkpoint_every": 6,
    }  # fmt: skip
    for number, (name, technique) in enumerate(ADDED):
        algorithm = {**algorithm, **technique}
        tree = study.policy("dapo", algorithm, trainer=trainer)
        tree["evaluation"] = {"every": 2, "samples": 4, "top_p": 1.0}
        found[name] = read_metrics(study.run(f"ablation-{number}", tree))
    goal = curve(found["GRPO"], SCORE)[-1][1]
    rows = []
    for name, lines in found.items():
        reached = next((step for step, score in curve(lines, SCORE) if score >= goal), None)
        until = [line for line in lines if reached is not None and line["step"] <= reached]
        rows.append([
            name, f"{curve(lines, SCORE)[-1][1]:.3f}", f"{lines[-1]['actor/entropy']:.3f}",
            f"{lines[-1]['response/length_mean']:.1f}",
            *([reached, int(sum(line.get("rows/generated") or 0 for line in until)), f"{seconds(until):.0f}"] if until else ["never"] * 3),
        ])  # fmt: skip
    header = ["", "held-out avg@4", "entropy", "length", "steps to GRPO's accuracy", "responses", "seconds"]
    text = (
        "# DAPO's techniques, added one after the other\n\nEach row adds a technique to the one above it; four updates per step. The last "
        f"three columns say what each needed to reach plain GRPO's final accuracy of {goal:.3f} for the first time.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("ablation", "Held-out avg@4", {name: curve(lines, SCORE) for name, lines in found.items()})
        + "\nOne seed, a model of 0.6 million weights and answers of twenty tokens: differences between neighbouring rows are within what "
        "a seed changes.\n\nRun it: `python examples/arithmetic/studies.py ablation`\n"
    )
    study.page("ablation", text)
    return {name: curve(lines, SCORE)[-1][1] for name, lines in found.items()}


STUDIES: dict[str, Callable[[Study], Numbers]] = {
    "reward-model": reward_model,
    "safe-rlhf": safe_rlhf,
    "algorithms": algorithms,
    "ablation": ablation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, "all"])
    parser.add_argument("--folder", type=Path, default=Path("build/studies"), help="data and runs")
    parser.add_argument("--pages", type=Path, default=Path("docs/results"), help="where the pages are written")
    parser.add_argument("--quick", action="store_true", help="two steps a run, to see that a study works")
    arguments = parser.parse_args()
    chosen = STUDIES if "all" in arguments.studies else arguments.studies
    for name in chosen:
        STUDIES[name](Study(arguments.folder, arguments.pages, arguments.quick))


if __name__ == "__main__":
    main()

"""Studies of recipes: seven of them from one start, and DAPO's techniques one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean

from pages import Lines, curve, generated, mean_curve, seconds, table
from study import RESPONSE_TOKENS, SCORE, STEPS, Numbers, Study, Tree, final_scores, over_seeds

from braidrl.observe.metrics import read_metrics

RECIPES: dict[str, tuple[str, Tree]] = {
    "ReMax": ("remax", {"kl_coef": 0.0}),
    "GRPO": ("grpo", {"kl_coef": 0.0}),
    "RLOO": ("rloo", {"kl_coef": 0.0}),
    "REINFORCE++": ("reinforce_plus_plus", {"kl_coef": 0.0}),
    "DAPO": ("dapo", {"overlong_cache": 8}),
    "GSPO": ("gspo", {}),
    "CISPO": ("cispo", {}),
}
TWICE = "GSPO, two updates a step"
"""With one update, GSPO's ratios are 1 and its gradient is GRPO's."""


def algorithms(study: Study) -> Numbers:
    """Seven recipes from the same start, over the seeds."""
    found = {
        name: over_seeds(study, flow, partial(study.policy, flow, algorithm))
        for name, (flow, algorithm) in RECIPES.items()
    }
    found[TWICE] = over_seeds(study, "gspo-twice", lambda seed: updated_twice(study.policy("gspo", {}, seed)))
    curves = {name: mean_curve(runs, SCORE) for name, runs in found.items()}
    rows = [
        [name, *final_scores(runs), runs[0][-1]["step"], f"{fmean(map(generated, runs)):,.0f}",
         f"{fmean(map(seconds, runs)):.0f}", f"{max(map(seconds, runs)):.0f}"]
        for name, runs in found.items()
    ]  # fmt: skip
    header = [
        "recipe", "held-out avg@4, mean of seeds", "each seed", "steps", "tokens generated", "seconds, mean", "longest",
    ]  # fmt: skip
    start = next(iter(curves.values()))[0][1]
    text = (
        f"All begin with the same model, which answers {start:.0%} of the held-out sums right, and train on "
        "32 prompts with 8 responses per step.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("algorithms", "Held-out avg@4, mean of the seeds", curves)
        + "\nA step is one update but in the last row, so that GSPO's ratios are 1 and its gradient is GRPO's; clipping tells them apart "
        "only where a batch makes several updates. DAPO samples until every group teaches something, which costs it the tokens. Seconds "
        "are those of one thread, and grow with what else the machine does.\n"
    )
    study.page("algorithms", "Seven recipes on sums", text)
    return {"start": start, **{name: points[-1][1] for name, points in curves.items()}}


def updated_twice(tree: Tree) -> Tree:
    """The run, with two optimizer steps on each batch."""
    rows = tree["trainer"]["prompts_per_step"] * tree["rollout"]["samples_per_prompt"]
    return {**tree, "trainer": {**tree["trainer"], "rows_per_update": rows // 2}}


RAMBLING = 0.4
SEED_SPREAD = 0.05
"""Of the final accuracies of one recipe in the table of seven."""
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
        "steps": STEPS, "prompts_per_step": 32, "rows_per_update": 64, "learning_rate": 2e-4, "checkpoint_every": 20,
    }  # fmt: skip
    for number, (name, technique) in enumerate(ADDED):
        algorithm = {**algorithm, **technique}
        tree = study.policy("dapo", algorithm, rambling=RAMBLING, trainer=trainer)
        tree["evaluation"] = {"every": 5, "samples": 4, "top_p": 1.0}
        found[name] = read_metrics(study.run(f"ablation-{number}", tree))
    goal = curve(found["GRPO"], SCORE)[-1][1]
    rows = []
    for name, lines in found.items():
        reached = next((step for step, score in curve(lines, SCORE) if score >= goal), None)
        until = [line for line in lines if reached is not None and line["step"] <= reached]
        rows.append([
            name, f"{curve(lines, SCORE)[-1][1]:.3f}", f"{lines[-1]['actor/entropy']:.3f}",
            f"{lines[-1]['response/length_mean']:.1f}", f"{lines[-1]['response/truncated_fraction']:.0%}",
            *([reached, int(sum(line.get("rows/generated") or 0 for line in until)), f"{seconds(until):.0f}"] if until else ["never"] * 3),
        ])  # fmt: skip
    header = ["", "held-out avg@4", "entropy", "length", "cut off", "steps to GRPO's accuracy", "responses", "seconds"]
    text = (
        "The model imitates a teacher who writes its working down several times in "
        f"{RAMBLING:.0%} of its answers, so that some do not end within the limit of {RESPONSE_TOKENS} tokens. Each row adds a technique "
        "to the one above it; four updates per step. The last "
        f"three columns say what each needed to reach plain GRPO's final accuracy of {goal:.3f} for the first time; responses are "
        "counted up to a batch's last group.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("ablation", "Held-out avg@4", {name: curve(lines, SCORE) for name, lines in found.items()})
        + f"\n{what_reproduces(found)}\n"
    )
    study.page("ablation", "DAPO's techniques, added one after the other", text)
    return {name: curve(lines, SCORE)[-1][1] for name, lines in found.items()}


def what_reproduces(found: Mapping[str, Lines]) -> str:
    """Which techniques raised the accuracy by more than a seed does."""
    finals = [(name, curve(lines, SCORE)[-1][1]) for name, lines in found.items()]
    gains = {name: final - before for (_, before), (name, final) in pairwise(finals)}
    shown = [name for name, gain in gains.items() if gain > SEED_SPREAD]
    others = [name for name in gains if name not in shown]
    return (
        f"A seed changes the accuracy by about {SEED_SPREAD:g} here. More than that comes from: {', '.join(shown) or 'none of them'}. "
        "What does not reproduce at this size, with one seed, 0.6 million weights and answers of twenty tokens: "
        f"{', '.join(others) or 'nothing'}."
    )

"""Studies of recipes: seven of them from one initial model, and DAPO's techniques one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median

from pages import Lines, Mean, curve, generated, mean_curve, seconds, table
from study import RAMBLING, RESPONSE_TOKENS, SCORE, STEPS, Numbers, Study, Tree, final_scores, over_seeds

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
    """Train seven recipes from the same initial model, over the seeds."""
    found = {
        name: over_seeds(study, flow, partial(study.policy, flow, algorithm))
        for name, (flow, algorithm) in RECIPES.items()
    }
    found[TWICE] = over_seeds(study, "gspo-twice", lambda seed: updated_twice(study.policy("gspo", {}, seed)))
    curves = {name: mean_curve(runs, SCORE) for name, runs in found.items()}
    rows = [
        [
            name,
            *final_scores(runs),
            gain(found["GRPO"], runs).text("+.3f") if name != "GRPO" else "",
            runs[0][-1]["step"],
            f"{fmean(map(generated, runs)):,.0f}",
            f"{fmean(map(seconds, runs)):.0f}",
            f"{max(map(seconds, runs)):.0f}",
        ]
        for name, runs in found.items()
    ]
    header = [
        "recipe",
        "held-out avg@4, mean of seeds",
        "each seed",
        "above GRPO",
        "steps",
        "tokens generated",
        "seconds, mean",
        "longest",
    ]
    start = next(iter(curves.values()))[0][1]
    text = (
        f"All recipes start from the same model, which answers {start:.0%} of the held-out sums right. They train on "
        "32 prompts with 8 responses per step.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("algorithms", "Held-out avg@4, mean of the seeds", curves)
        + "\nThe column *above GRPO* is paired by seed, and ± is half of a 95% interval of the mean (Student's t). "
        "A step is one update, except in the last row. With one update GSPO's ratios are 1 and its gradient is "
        "GRPO's; clipping makes a "
        "difference only with several updates per batch. DAPO samples until every group has a signal, and therefore "
        "uses more tokens. "
        "Seconds are for one thread. Other load on the machine raises them.\n"
    )
    study.page("algorithms", "Seven recipes on sums", text)
    return {"start": start, **{name: points[-1][1] for name, points in curves.items()}}


def updated_twice(tree: Tree) -> Tree:
    """Return the configuration with two optimizer steps on each batch."""
    rows = tree["trainer"]["prompts_per_step"] * tree["rollout"]["samples_per_prompt"]
    return {**tree, "trainer": {**tree["trainer"], "rows_per_update": rows // 2}}


PLAIN: Tree = {
    "aggregate": "seq-mean-token-mean",
    "clip_high": 0.2,
    "overlong_cache": 0,
    "dynamic_sampling": False,
}
ADDED: tuple[tuple[str, Tree], ...] = (
    ("GRPO", {}),
    ("+ overlong filtering", {"overlong_filter": True}),
    ("+ Clip-Higher", {"clip_high": 0.28}),
    ("+ soft overlong punishment", {"overlong_cache": 8, "overlong_filter": False}),
    ("+ token-level loss", {"aggregate": "token-mean"}),
    ("+ dynamic sampling (DAPO)", {"dynamic_sampling": True}),
)


def ablation(study: Study) -> Numbers:
    """Make DAPO's table: each row adds a technique to the one above it, over the seeds."""
    algorithm, found = dict(PLAIN), {}
    for number, (name, technique) in enumerate(ADDED):
        algorithm = {**algorithm, **technique}
        found[name] = over_seeds(study, f"ablation-{number}", partial(ablated, study, algorithm))
    curves = {name: mean_curve(runs, SCORE) for name, runs in found.items()}
    goals = [curve(lines, SCORE)[-1][1] for lines in found["GRPO"]]
    gained = gains(found)
    rows = [
        [
            name,
            *final_scores(runs),
            gained[name].text("+.3f") if name in gained else "",
            *middle(runs),
            *reached(runs, goals),
        ]
        for name, runs in found.items()
    ]
    header = [
        "",
        "held-out avg@4, mean of seeds",
        "each seed",
        "gained over the row above",
        "entropy",
        "length",
        "cut off",
        "seeds that reached GRPO's accuracy",
        "steps to it",
        "responses",
    ]
    text = (
        f"The model imitates a teacher that repeats its working in {RAMBLING.rambling:.0%} of its answers. Some "
        "answers "
        f"therefore exceed the limit of {RESPONSE_TOKENS} tokens. Each row adds a technique to the row above; a step "
        "makes four updates. "
        "Gains are paired by seed, and ± is half of a 95% interval of the mean (Student's t). The last three columns "
        "count the seeds that "
        "reached plain GRPO's final accuracy with the same seed, and give the median of what they needed. Responses "
        "are counted up to a "
        "batch's last group.\n\n"
        + table(header, rows)
        + "\n"
        + study.curves("ablation", "Held-out avg@4, mean of the seeds", curves)
        + f"\n{what_reproduces(gained, len(study.seeds))}\n"
    )
    study.page("ablation", "DAPO's techniques, added one by one", text)
    return {name: points[-1][1] for name, points in curves.items()}


def ablated(study: Study, algorithm: Tree, seed: int) -> Tree:
    """Return the configuration of a run of the ablation."""
    trainer = {
        "steps": STEPS,
        "prompts_per_step": 32,
        "rows_per_update": 64,
        "learning_rate": 2e-4,
        "checkpoint_every": 20,
    }
    evaluation = {"every": 5, "samples": 4, "top_p": 1.0}
    return study.policy("dapo", algorithm, seed, RAMBLING, trainer=trainer, evaluation=evaluation)


def gains(found: Mapping[str, Sequence[Lines]]) -> dict[str, Mean]:
    """Return each row's gain in the final score over the row before it."""
    return {name: gain(found[above], found[name]) for above, name in pairwise(found)}


def gain(before: Sequence[Lines], after: Sequence[Lines]) -> Mean:
    """Return the gains in the final score of the second runs, seed by seed."""
    scores = ([curve(lines, SCORE)[-1][1] for lines in runs] for runs in (before, after))
    return Mean.of([second - first for first, second in zip(*scores, strict=True)])


def middle(runs: Sequence[Lines]) -> list[str]:
    """Return three cells of a table, means over the seeds at the last step: entropy, length, share of truncated
    responses.
    """
    entropy, length, cut = (
        fmean(lines[-1][key] for lines in runs)
        for key in ("actor/entropy", "response/length_mean", "response/truncated_fraction")
    )
    return [f"{entropy:.3f}", f"{length:.1f}", f"{cut:.0%}"]


def reached(runs: Sequence[Lines], goals: Sequence[float]) -> list[str]:
    """Return three cells: the number of runs that reached their seed's goal, and the median steps and responses until
    then.
    """
    steps, responses = [], []
    for lines, goal in zip(runs, goals, strict=True):
        first = next((step for step, score in curve(lines, SCORE) if score >= goal), None)
        if first is not None:
            steps.append(first)
            responses.append(sum(line.get("rows/generated") or 0 for line in lines if line["step"] <= first))
    cells = [f"{median(steps):.0f}", f"{median(responses):,.0f}"] if steps else ["", ""]
    return [f"{len(steps)} of {len(runs)}", *cells]


def what_reproduces(gained: Mapping[str, Mean], seeds: int) -> str:
    """Return the techniques that changed the accuracy by more than the seeds explain."""
    ways: dict[str, list[str]] = {"raises": [], "lowers": [], "does not show": []}
    for name, gain in gained.items():
        way = "does not show" if abs(gain.mean) <= gain.half else "raises" if gain.mean > 0 else "lowers"
        ways[way].append(name)
    return (
        f"With {seeds} seeds, 0.6 million weights and answers of twenty tokens:\n\n"
        f"* Accuracy rises, with a 95% interval above 0: {', '.join(ways['raises']) or 'none'}.\n"
        f"* Accuracy falls, with a 95% interval below 0: {', '.join(ways['lowers']) or 'none'}.\n"
        f"* No effect shows: {', '.join(ways['does not show']) or 'none'}."
    )

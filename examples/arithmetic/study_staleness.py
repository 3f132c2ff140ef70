"""The study of staleness: what it costs and gains to generate with weights of before, in five ways.

One seed after the other, each in every way: the page is written after each of them.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

from pages import mean_curve, seconds, table
from study import SCORE, Numbers, Study, Tree, final_scores, over_seeds
from study_runtimes import LATE_LEARNING_RATE

ENGINES = 2
SLOTS = 8
"""Of each engine: rows take turns in them, as on a real machine, so that an engine is at work when weights come."""
TOKENS_PER_ITERATION = 20
WAYS: dict[str, Tree] = {
    "synchronous": {"runtime": "streaming"},
    "one-step": {"runtime": "streaming", "streaming": {"weights": "delayed"}},
    "half-step": {"runtime": "streaming", "streaming": {"weights": "rolling"}},
    "interrupt": {"runtime": "streaming", "streaming": {"weights": "interrupt"}},
    "partial": {"runtime": "streaming"},
}


def staleness(study: Study) -> Numbers:
    """DAPO without staleness and with a version of it, over the seeds."""
    found: Numbers = {}
    for number in range(len(study.seeds)):
        found = over(Study(study.folder, study.pages, study.quick, study.seeds[: number + 1]))
    return found


def over(study: Study) -> Numbers:
    """Every way over the study's seeds, and the page."""
    rows, curves = [], {}
    for name in WAYS:
        runs = over_seeds(study, f"staleness-{name}", partial(under, study, name))
        steps = " ".join(str(lines[-1]["step"]) for lines in runs)
        rows.append([name, *final_scores(runs), steps, f"{fmean(map(seconds, runs)):.0f}"])
        curves[name] = mean_curve(runs, SCORE)
    text = (
        f"DAPO, 32 prompts with 8 responses per step, {ENGINES} processes that generate, {SLOTS} rows at once each. "
        f"Seeds: {', '.join(map(str, study.seeds))}. All but the first are trained with rows of one "
        "version before, and learn at half the rate: with gradients that come a step late the full one overshoots.\n\n"
        + table(["way", "held-out avg@4, mean of seeds", "each seed", "steps", "seconds"], rows)
        + "\n"
        + study.curves("staleness", "Held-out avg@4, mean of the seeds", curves)
        + f"\nPartial rollout sets a response aside after {TOKENS_PER_ITERATION} tokens for a batch, and begins rows without staleness. "
        "Seconds grow with what else the machine does.\n"
    )
    study.page("staleness", "What staleness costs on sums", text)
    return {name: points[-1][1] for name, points in curves.items()}


def under(study: Study, name: str, seed: int) -> Tree:
    """A run of DAPO that takes new weights in one of the ways. Processes that share two cores have one thread each."""
    tree = study.policy("dapo", {"overlong_cache": 8}, seed, threads=1, **WAYS[name])
    tree["streaming"] = {**tree.get("streaming", {}), "workers": {"actor.generate": ENGINES}}
    tree["rollout"] |= {"slots": SLOTS}
    if name != "synchronous":
        tree["trainer"] |= {"max_staleness": 1, "surplus": "keep", "learning_rate": LATE_LEARNING_RATE}
    if name == "partial":
        tree["rollout"] |= {"tokens_per_iteration": TOKENS_PER_ITERATION}
    return tree

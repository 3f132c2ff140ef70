"""The study of staleness: what it costs and gains to generate with weights of before, in five ways."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from pages import mean_curve, seconds, table
from study import SCORE, Numbers, Study, Tree, final_scores, over_seeds
from study_runtimes import LATE_LEARNING_RATE

ENGINES = 2
WAYS: dict[str, Tree] = {
    "synchronous": {"runtime": "streaming"},
    "one-step": {"runtime": "streaming", "streaming": {"weights": "delayed"}},
    "half-step": {"runtime": "streaming", "streaming": {"weights": "rolling"}},
    "interrupt": {"runtime": "streaming", "streaming": {"weights": "interrupt"}},
    "partial": {"runtime": "eager"},
}


def staleness(study: Study) -> Numbers:
    """DAPO without staleness and with a version of it, over the seeds."""
    rows, curves = [], {}
    for name in WAYS:
        runs = over_seeds(study, f"staleness-{name}", partial(under, study, name))
        steps = " ".join(str(lines[-1]["step"]) for lines in runs)
        rows.append([name, *final_scores(runs), steps, f"{fmean(map(seconds, runs)):.0f}"])
        curves[name] = mean_curve(runs, SCORE)
    text = (
        f"DAPO, 32 prompts with 8 responses per step, {ENGINES} processes that generate. All but the first are trained with rows of one "
        "version before, and learn at half the rate: with gradients that come a step late the full one overshoots.\n\n"
        + table(["way", "held-out avg@4, mean of seeds", "each seed", "steps", "seconds"], rows)
        + "\n"
        + study.curves("staleness", "Held-out avg@4, mean of the seeds", curves)
        + "\nPartial rollout sets a response aside after 20 tokens of an iteration, in one process. "
        "Seconds grow with what else the machine does.\n"
    )
    study.page("staleness", "What staleness costs on sums", text)
    return {name: points[-1][1] for name, points in curves.items()}


def under(study: Study, name: str, seed: int) -> Tree:
    """A run of DAPO that takes new weights in one of the ways. Processes that share two cores have one thread each."""
    tree = study.policy("dapo", {"overlong_cache": 8}, seed, threads=1, **WAYS[name])
    if tree["runtime"] == "streaming":
        tree["streaming"] = {**tree.get("streaming", {}), "workers": {"actor.generate": ENGINES}}
    if name != "synchronous":
        tree["trainer"] |= {"max_staleness": 1, "surplus": "keep", "learning_rate": LATE_LEARNING_RATE}
    if name == "partial":
        tree["rollout"] |= {"tokens_per_iteration": 20}
    return tree

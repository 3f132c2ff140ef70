"""Study of runtimes: one recipe from one initial model under each of them."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from pages import mean_curve, seconds, table
from study import SCORE, Numbers, Study, Tree, final_scores, over_seeds

LATE_LEARNING_RATE = 2.5e-4
"""Half of the others': with gradients that arrive a step late their rate overshoots, and accuracy falls before it
rises.
"""
RUNTIMES: dict[str, Tree] = {
    "eager": {"runtime": "eager"},
    "hybrid": {"runtime": "hybrid", "workers": 2},
    "distributed": {"runtime": "distributed", "workers": 2},
    "streaming": {"runtime": "streaming"},
    "streaming, staleness 1": {"runtime": "streaming"},
}


def runtimes(study: Study) -> Numbers:
    """Train DAPO under every runtime, over the seeds."""
    rows, curves = [], {}
    for name in RUNTIMES:
        runs = over_seeds(study, f"runtime-{name.replace(', ', '-').replace(' ', '-')}", partial(under, study, name))
        rows.append([name, *final_scores(runs), f"{fmean(map(seconds, runs)):.0f}"])
        curves[name] = mean_curve(runs, SCORE)
    start = curves["eager"][0][1]
    text = (
        f"DAPO, 32 prompts with 8 responses per step, from a model that answers {start:.0%} of the held-out "
        "sums right. Without staleness the runtimes differ only by float32 rounding, which can change one sampled "
        "token; "
        "the runs then "
        "diverge. Staleness 1 uses half the learning rate: with gradients that arrive a step late, the "
        "full rate overshoots.\n\n"
        + table(["runtime", "held-out avg@4, mean of seeds", "each seed", "seconds"], rows)
        + "\n"
        + study.curves("runtimes", "Held-out avg@4, mean of the seeds", curves)
        + "\nHybrid and distributed have two workers. Streaming has one process each for generation, checks and "
        "training. All run "
        "on two cores. Other load on the machine raises the seconds, so they do not compare the runtimes.\n"
    )
    study.page("runtimes", "Four runtimes on sums", text)
    return {"start": start, **{name: points[-1][1] for name, points in curves.items()}}


def under(study: Study, name: str, seed: int) -> Tree:
    """Return the configuration of DAPO under a runtime. Processes that share two cores have one thread each."""
    tree = study.policy("dapo", {"overlong_cache": 8}, seed, threads=1, **RUNTIMES[name])
    if name.endswith("staleness 1"):
        tree["trainer"] |= {"max_staleness": 1, "learning_rate": LATE_LEARNING_RATE}
    return tree

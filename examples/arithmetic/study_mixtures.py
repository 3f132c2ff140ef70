"""Study of mixtures of experts: GRPO on a mixture and on a dense model with as many active parameters."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from pages import mean_curve, seconds, table
from study import SCORE, Numbers, Study, Tree, final_scores, over_seeds

DENSE, MIXTURE = "qwen3", "qwen3_moe"
RUNS: dict[str, tuple[str, Tree]] = {
    "dense": (DENSE, {}),
    "mixture": (MIXTURE, {}),
    "mixture, expert 2": (MIXTURE, {"runtime": "distributed", "workers": 2}),
    "mixture, streaming with replay": (MIXTURE, {"runtime": "streaming"}),
}


def mixtures(study: Study) -> Numbers:
    """Train GRPO on a dense model and on a mixture under three runtimes, over the seeds."""
    rows, curves = [], {}
    for name in RUNS:
        runs = over_seeds(study, f"mixtures-{name.replace(', ', '-').replace(' ', '-')}", partial(tree_of, study, name))
        curves[name] = mean_curve(runs, SCORE)
        rows.append([name, f"{curves[name][0][1]:.2f}", *final_scores(runs), f"{fmean(map(seconds, runs)):.0f}"])
    text = (
        "GRPO, 32 prompts with 8 responses per step, on a dense model and on a mixture of 8 experts of which a token "
        "has 2: with half the width for each, as many parameters are active. Both have imitated the same teacher, the "
        "mixture for three times as many steps, since an expert sees a quarter of the tokens.\n\n"
        + table(["model", "held-out avg@4 before", "after, mean of seeds", "each seed", "seconds"], rows)
        + "\n"
        + study.curves("mixtures", "Held-out avg@4, mean of the seeds", curves)
        + "\nAll run on two cores. Other load on the machine raises the seconds.\n"
    )
    study.page("mixtures", "A mixture of experts on sums", text)
    return {name: points[-1][1] for name, points in curves.items()}


def tree_of(study: Study, name: str, seed: int) -> Tree:
    """Return the configuration of a run. Processes that share two cores have one thread each."""
    family, more = RUNS[name]
    algorithm: Tree = {"replay": "inference", "old": "recompute"} if name.endswith("replay") else {}
    tree = study.policy("grpo", algorithm, seed, family=family, threads=1, **more)
    # With twice this rate mixtures forget again what they have learned.
    tree["trainer"] |= {"learning_rate": 2.5e-4}
    if "expert" in name:
        tree["trainer"] |= {"layout": {"expert": 2}}
    if family == MIXTURE:
        tree["trainer"] |= {"balance": {}}
    return tree

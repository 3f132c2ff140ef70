"""Studies of the recipes on tasks that a CPU can train: each makes a few runs and a page with their curves.

reward-model    a reward model from preference pairs, then PPO with a critic and that reward model
safe-rlhf       a task whose best answer breaks the cost limit
algorithms      seven recipes from the same start, over three seeds
ablation        GRPO plus DAPO's techniques, added one by one, over three seeds
techniques      each technique in a setting where its argument predicts an effect, over three seeds
runtimes        DAPO under every runtime, over three seeds
staleness       DAPO with rows of the previous version, in five ways, over three seeds
mixtures        GRPO on a mixture of experts and on a dense model with as many active parameters, over three seeds
vllm            GRPO from the tokens of a stock `vllm serve`, and its speed beside a reproducible one; needs `make vllm`

A study over several seeds runs the seeds of `--seeds`. To resume an interrupted study, call it again: finished runs are
not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from study import SEEDS, Numbers, Study
from study_mixtures import mixtures
from study_recipes import ablation, algorithms
from study_rewards import reward_model, safe_rlhf
from study_runtimes import runtimes
from study_staleness import staleness
from study_techniques import techniques
from study_vllm import vllm

STUDIES: dict[str, Callable[[Study], Numbers]] = {
    "reward-model": reward_model,
    "safe-rlhf": safe_rlhf,
    "algorithms": algorithms,
    "ablation": ablation,
    "techniques": techniques,
    "runtimes": runtimes,
    "staleness": staleness,
    "mixtures": mixtures,
    "vllm": vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, "all"])
    parser.add_argument("--folder", type=Path, default=Path("build/studies"), help="data and runs")
    parser.add_argument("--pages", type=Path, default=Path("docs/results"), help="where the pages are written")
    parser.add_argument("--quick", action="store_true", help="two steps a run, to see that a study works")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the studies over several; default: 0 1 2"
    )
    arguments = parser.parse_args()
    chosen = STUDIES if "all" in arguments.studies else arguments.studies
    for name in chosen:
        STUDIES[name](Study(arguments.folder, arguments.pages, arguments.quick, arguments.seeds))


if __name__ == "__main__":
    main()

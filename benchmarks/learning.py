"""GRPO on sums in words with SmolLM2-135M-Instruct: Braid beside TRL, the same model, prompts, reward, sizes and
learning rate.

    make build/bench-venv/installed
    python -m benchmarks.learning --seeds 0 1 2

Both sides train `--steps` steps of `--prompts` prompts with `--threads` threads; steps and prompts default to the
configuration's. Seeds that benchmarks/results/learning.json already holds for these sizes are not repeated, so they may
come from several days and machines. Finished runs in build/smollm2 are not repeated either. Writes that file and
docs/results/smollm2-trl.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe
from braidrl.config import Config, load_config
from braidrl.observe.metrics import read_metrics
from examples.arithmetic.pages import Lines, Mean, curve, table, write_curves, write_markdown
from examples.smollm2.fetch import fetch
from examples.smollm2.learn import PAGES, Way, run
from examples.smollm2.tasks import FOLDER, write_tasks

CONFIG = Path("examples/smollm2/sums.yaml")
PEER = Path("build/bench-venv/bin/python")
RESULT = Path("benchmarks/results/learning.json")
SCORE = "eval/held_out/avg@4"
SIDES = ("Braid", "TRL")
BATCH_ROWS = 64
"""Rows per forward pass of TRL; chosen so that their logits fit in memory."""
Run = dict[str, Any]
"""A seed's date, machine, and measurements of each side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, help="prompts of a step; default: the configuration's")
    arguments = parser.parse_args()
    fetch()
    write_tasks()
    asked = {"trainer.steps": arguments.steps, "trainer.prompts_per_step": arguments.prompts}
    overrides = [f"{name}={value}" for name, value in asked.items() if value]
    config = load_config(CONFIG, overrides)
    own = f"-{config.trainer.prompts_per_step}x{config.trainer.steps}" if overrides else ""
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    runs = recorded(config)
    for seed in arguments.seeds:
        if seed not in runs:
            runs[seed] = sides(config, own, overrides, seed, arguments.threads)
            write_results(config, runs)
            write_page(config, runs)


def sizes(config: Config) -> dict[str, int]:
    """Return the settings that must be equal for runs to be comparable."""
    return {"steps": config.trainer.steps, "prompts_per_step": config.trainer.prompts_per_step}


def recorded(config: Config) -> dict[int, Run]:
    """Return the runs in the results file by seed, or none if they have other sizes."""
    found = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    same = all(found.get(name) == size for name, size in sizes(config).items())
    return {int(seed): run for seed, run in found["runs"].items()} if same else {}


def sides(config: Config, own: str, overrides: list[str], seed: int, threads: int) -> Run:
    """Train both sides with a seed and return the measurements of each."""
    ours = run(Way("sums"), seed, f"sums{own}-grpo-{seed}", overrides)
    theirs = peer(config, FOLDER / f"sums{own}-trl-{seed}.jsonl", seed, threads)
    both = {"Braid": measured(read_metrics(ours), config), "TRL": measured(theirs, config)}
    return {"date": datetime.date.today().isoformat(), "machine": describe(threads), **both}


def measured(lines: Lines, config: Config) -> dict[str, Any]:
    """Return a run's scores by step, and the medians of seconds and of response tokens per second."""
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    steps = [line for line in lines if line.get("time/step")]
    return {
        "scores": curve(lines, SCORE),
        "seconds_per_step": median(line["time/step"] for line in steps),
        "tokens_per_second": median(rows * line["response/length_mean"] / line["time/step"] for line in steps),
    }


def peer(config: Config, metrics: Path, seed: int, threads: int) -> Lines:
    """Return TRL's metrics of a seed; train first if its metrics file does not exist."""
    if not metrics.is_file() or read_lines(metrics)[-1]["step"] < config.trainer.steps:
        metrics.unlink(missing_ok=True)
        settings = metrics.with_suffix(".settings.json")
        settings.write_text(json.dumps(task(config, seed, threads, metrics)))
        subprocess.run(
            [PEER, "-m", "benchmarks.sides.learn_trl", settings], check=True, env={**os.environ, "PYTHONPATH": "."}
        )
    return read_lines(metrics)


def task(config: Config, seed: int, threads: int, metrics: Path) -> dict[str, Any]:
    """Return the settings for TRL's side, by our names."""
    trainer, rollout = config.trainer, config.rollout
    return {
        "model": str(config.model),
        "train": "build/smollm2/sums.jsonl",
        "held_out": "build/smollm2/sums_held_out.jsonl",
        "metrics": str(metrics),
        "seed": seed,
        "threads": threads,
        "evaluate_every": config.evaluation.every,
        "steps": trainer.steps,
        "group": rollout.samples_per_prompt,
        "rows": trainer.prompts_per_step * rollout.samples_per_prompt,
        "batch_rows": BATCH_ROWS,
        "response_tokens": rollout.max_response_tokens,
        "learning_rate": trainer.learning_rate,
        "warmup_steps": trainer.warmup_steps,
        "betas": trainer.betas,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
    }


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_results(config: Config, runs: dict[int, Run]) -> None:
    """Write the results file with all seeds."""
    content = {"benchmark": "learning", **sizes(config), "runs": {str(seed): runs[seed] for seed in sorted(runs)}}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def write_page(config: Config, runs: dict[int, Run]) -> None:
    """Write the page: scores at the same steps, seconds per step, and both sides' curves."""
    rows, curves = [], {}
    for seed, each in sorted(runs.items()):
        for name in SIDES:
            points = curves[f"{name}, seed {seed}"] = each[name]["scores"]
            speed = [f"{each[name]['seconds_per_step']:.1f}", f"{each[name]['tokens_per_second']:.1f}"]
            machine = each["machine"]
            where = f"{machine['processor']}, threads: {machine['threads']}"
            rows.append([name, seed, f"{points[0][1]:.3f}", f"{points[-1][1]:.3f}", *speed, where])
    finals = [Mean.of([each[name]["scores"][-1][1] for each in runs.values()]).text(".3f") for name in SIDES]
    ratios = Mean.of([each["Braid"]["tokens_per_second"] / each["TRL"]["tokens_per_second"] for each in runs.values()])
    title = "SmolLM2-135M-Instruct learns sums: Braid and TRL"
    write_curves(PAGES / "smollm2-trl.svg", title, curves)
    trainer, rollout = config.trainer, config.rollout
    header = [
        "",
        "seed",
        "score at the start",
        f"after {trainer.steps} steps",
        "seconds per step",
        "response tokens per second",
        "machine",
    ]
    write_markdown(
        PAGES / "smollm2-trl.md",
        "\n".join(
            [
                f"# {title}\n",
                f"    python -m benchmarks.learning --prompts {trainer.prompts_per_step} --threads 1 --seeds "
                f"{' '.join(map(str, sorted(runs)))}\n",
                f"GRPO without a KL term, {trainer.prompts_per_step} prompts with {rollout.samples_per_prompt} "
                "responses of up to "
                f"{rollout.max_response_tokens} tokens a step, {trainer.steps} steps, float32. Scores are those of "
                "held-out sums, with four "
                f"samples at temperature 1. The final scores are {' and '.join(finals)}, means with 95% intervals "
                "(Student's t).\n\nBraid makes "
                f"{ratios.mean:.1f} times the tokens per second of TRL 1.16, which generates with transformers. The "
                "rate is response tokens over "
                "the seconds of whole steps, a median per run, without evaluation. Both sides of a seed ran on the "
                "same machine, beside some "
                "other load.\n",
                table(header, rows),
                f"![{title}](smollm2-trl.svg)\n",
            ]
        ),
    )


if __name__ == "__main__":
    main()

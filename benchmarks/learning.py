"""GRPO on sums in words with SmolLM2-135M-Instruct: Braid beside TRL, the same model, prompts, reward, sizes and learning rate.

    make build/bench-venv/installed
    python -m benchmarks.learning --seeds 0 1 2

Both train with as many threads as are given. Runs that are done are not repeated; with `--steps` fewer than the configuration's the
curves end there, and with `--prompts` a step has fewer than the configuration's. Writes benchmarks/results/learning.json and
docs/results/smollm2-trl.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.machine import describe
from braidrl.config import Config, load_config
from braidrl.observe.metrics import read_metrics
from examples.arithmetic.pages import Lines, Mean, curve, table, write_curves
from examples.smollm2.fetch import fetch
from examples.smollm2.learn import PAGES, Way, run
from examples.smollm2.tasks import FOLDER, write_tasks

CONFIG = Path("examples/smollm2/sums.yaml")
PEER = Path("build/bench-venv/bin/python")
RESULT = Path("benchmarks/results/learning.json")
SCORE = "eval/held_out/avg@4"
BATCH_ROWS = 64
"""Rows that TRL computes with at once, so that their logits fit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default the configuration's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, help="of a step, by default the configuration's")
    arguments = parser.parse_args()
    fetch()
    write_tasks()
    asked = {"trainer.steps": arguments.steps, "trainer.prompts_per_step": arguments.prompts}
    overrides = [f"{name}={value}" for name, value in asked.items() if value]
    config = load_config(CONFIG, overrides)
    own = f"-{config.trainer.prompts_per_step}x{config.trainer.steps}" if overrides else ""
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    found = {}
    for seed in arguments.seeds:
        ours = run(Way("sums"), seed, f"sums{own}-grpo-{seed}", overrides)
        found[seed] = {
            "Braid": read_metrics(ours),
            "TRL": peer(config, FOLDER / f"sums{own}-trl-{seed}.jsonl", seed, arguments.threads),
        }
    write(found, config, arguments.threads)


def peer(config: Config, metrics: Path, seed: int, threads: int) -> Lines:
    """Return TRL's metrics of a seed, which a run writes to a file that is not there yet."""
    if not metrics.is_file() or read_lines(metrics)[-1]["step"] < config.trainer.steps:
        metrics.unlink(missing_ok=True)
        settings = metrics.with_suffix(".settings.json")
        settings.write_text(json.dumps(task(config, seed, threads, metrics)))
        subprocess.run(
            [PEER, "-m", "benchmarks.sides.learn_trl", settings], check=True, env={**os.environ, "PYTHONPATH": "."}
        )
    return read_lines(metrics)


def task(config: Config, seed: int, threads: int, metrics: Path) -> dict[str, Any]:
    """Return what TRL is given: the settings of the run, by names of ours."""
    trainer, rollout = config.trainer, config.rollout
    return {
        "model": str(config.model), "train": "build/smollm2/sums.jsonl", "held_out": "build/smollm2/sums_held_out.jsonl",
        "metrics": str(metrics), "seed": seed, "threads": threads, "evaluate_every": config.evaluation.every, "steps": trainer.steps,
        "group": rollout.samples_per_prompt, "rows": trainer.prompts_per_step * rollout.samples_per_prompt, "batch_rows": BATCH_ROWS,
        "response_tokens": rollout.max_response_tokens, "learning_rate": trainer.learning_rate, "warmup_steps": trainer.warmup_steps,
        "betas": trainer.betas, "weight_decay": trainer.weight_decay, "max_grad_norm": trainer.max_grad_norm,
    }  # fmt: skip


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(found: dict[int, dict[str, Lines]], config: Config, threads: int) -> None:
    """Write the file of results and the page: scores at the same steps, seconds per step, and both curves."""
    rows, curves, last = [], {}, min(lines[-1]["step"] for sides in found.values() for lines in sides.values())
    per_step = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    for seed, sides in found.items():
        for name, lines in sides.items():
            lines[:] = [line for line in lines if line["step"] <= last]
            points = curves[f"{name}, seed {seed}"] = curve(lines, SCORE)
            speed = [f"{seconds_each(lines):.1f}", f"{tokens_each_second(lines, per_step):.1f}"]
            rows.append([name, seed, f"{points[0][1]:.3f}", f"{points[-1][1]:.3f}", *speed])
    by_name = {name: [each[name] for each in found.values()] for name in ("Braid", "TRL")}
    finals = {name: Mean.of([curve(lines, SCORE)[-1][1] for lines in runs]) for name, runs in by_name.items()}
    speeds = {name: fmean(tokens_each_second(lines, per_step) for lines in runs) for name, runs in by_name.items()}
    ratio = speeds["Braid"] / speeds["TRL"]
    RESULT.write_text(json.dumps({
        "benchmark": "learning", "date": datetime.date.today().isoformat(), "machine": describe(threads), "steps": last,
        "seconds_per_step": {name: fmean(map(seconds_each, runs)) for name, runs in by_name.items()},
        "response_tokens_per_second": speeds, "ratio": round(ratio, 2),
        "runs": {str(seed): {name: curve(lines, SCORE) for name, lines in sides.items()} for seed, sides in found.items()},
    }, indent=1) + "\n")  # fmt: skip
    title = "SmolLM2-135M-Instruct learns sums: Braid and TRL"
    write_curves(PAGES / "smollm2-trl.svg", title, curves)
    trainer, rollout = config.trainer, config.rollout
    header = ["", "seed", "score at the start", f"after {last} steps", "seconds per step", "response tokens per second"]
    (PAGES / "smollm2-trl.md").write_text("\n".join([
        f"# {title}\n", f"    python -m benchmarks.learning --prompts {trainer.prompts_per_step} --seeds {' '.join(map(str, found))}\n",
        f"GRPO without a KL term, {trainer.prompts_per_step} prompts with {rollout.samples_per_prompt} responses of up to "
        f"{rollout.max_response_tokens} tokens a step, {last} steps, float32, threads: {threads}. Scores: held-out sums, four samples at "
        f"temperature 1; at the end they are {finals['Braid'].text('.3f')} and {finals['TRL'].text('.3f')}, "
        f"{'of one seed' if len(found) == 1 else 'means with 95% intervals (Student)'}. Braid makes {ratio:.1f} times the tokens per "
        "second of TRL 1.16, which generates with transformers: response "
        "tokens over the seconds of whole steps, medians per run, evaluation apart.\n",
        table(header, rows), f"![{title}](smollm2-trl.svg)\n",
    ]))  # fmt: skip


def tokens_each_second(lines: Lines, rows: int) -> float:
    """Return the median of a step's response tokens over its seconds; a step has so many rows."""
    return median(rows * line["response/length_mean"] / line["time/step"] for line in lines if line.get("time/step"))


def seconds_each(lines: Lines) -> float:
    """Return the median of the seconds of a step."""
    return median(line["time/step"] for line in lines if line.get("time/step"))


if __name__ == "__main__":
    main()

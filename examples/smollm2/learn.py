"""Training of the real model, and its pages of results: `python -m examples.smollm2.learn sums`.

model and questions ──braid train, for each seed──▶ metrics, responses before and after ──▶ docs/results/smollm2-NAME.md

A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.saving.checkpoints import export_model
from examples.arithmetic.pages import Curve, curve, table, write_curves, write_markdown
from examples.smollm2.fetch import fetch
from examples.smollm2.preferences import prepare, recorded_responses
from examples.smollm2.tasks import FOLDER, write_tasks

HERE, PAGES = Path(__file__).parent, Path("docs/results")
SHOWN = 6
"""Number of samples before and after on a page."""


@dataclass(frozen=True)
class Way:
    """A way to train on a task: a configuration beside this file, overrides, and a run for each seed."""

    config: str
    changed: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    exported: str = ""
    """Folder of the trained model, as the initial model of a later way."""


@dataclass(frozen=True)
class Page:
    """A task's page: its title, its introduction, the compared metric, and the compared ways."""

    title: str
    text: str
    score: str
    ways: dict[str, Way]
    prepare: Callable[[], None] | None = None
    """Makes the files that the ways need beside the model and the questions."""


GSM8K_SCORE = (
    "The score is the share of right answers to all 1,319 test questions, with greedy decoding. An answer needs the "
    "training text's answer mark to count. At a share of 0.03 the standard error is 0.005."
)
ONLY_AFTERWARDS = ("trainer.steps=84", "evaluation.every=84", "evaluation.before_first_step=false")
FEW_STEPS = "data.train={path: openai/gsm8k, convert: 'examples/smollm2/tasks.py:few_steps'}"
STUDIES = {
    "sums": Page(
        "SmolLM2-135M-Instruct learns sums",
        "Sums of two numbers from one to twenty, asked in words. 80 of the 400 pairs are held out. The score is the "
        "share of right answers on them, with four samples each at temperature 1.",
        "eval/held_out/avg@4",
        {
            "GRPO": Way("sums", seeds=(0, 1, 2)),
            "GRPO bfloat16": Way("sums", ("dtype=bfloat16", "trainer.max_tokens_per_device=4096")),
            "GRPO LoRA": Way(
                "sums", ("trainer.lora={}", "trainer.learning_rate=4e-4", "trainer.max_tokens_per_device=4096")
            ),
        },
    ),
    "sums-dapo": Page(
        "SmolLM2-135M-Instruct learns sums by DAPO",
        "The same sums, with Clip-Higher, only groups that have right and wrong answers, a token-level loss, and a "
        "penalty for truncated responses. The score is the share of right answers on the 80 held-out pairs, with four "
        "samples each at temperature 1.",
        "eval/held_out/avg@4",
        {"DAPO": Way("sums_dapo")},
    ),
    "told": Page(
        "SmolLM2-135M-Instruct follows instructions",
        "Each question has two instructions, of four kinds: answer in JSON, in exactly n words, in capitals, with a "
        "given word. The score is the share of followed instructions, on eight topics that do not occur in training.",
        "eval/held_out/score_mean",
        {"GRPO": Way("told")},
    ),
    "letters": Page(
        "SmolLM2-135M-Instruct counts letters, in several tries",
        "A question of reasoning-gym, through gem: how often does a letter occur in a text? Four answers are allowed. "
        "The first is worth 1, each later one a quarter less. The score is the mean worth of 48 held-out questions.",
        "eval/held_out/score_mean",
        {"GRPO": Way("letters")},
    ),
    "products": Page(
        "SmolLM2-135M-Instruct calls a calculator",
        "Products of two two-digit numbers, which the model cannot compute by itself. It must call a tool with the two "
        "numbers, read the result and repeat it. The score is the share of right answers to 80 held-out questions.",
        "eval/held_out/avg@4",
        {"GRPO": Way("products")},
    ),
    "brevity": Page(
        "SmolLM2-135M-Instruct learns from preferences to be brief",
        "The model answers each question eight times; the shortest response is preferred to the longest. DPO learns "
        "from these pairs. PPO learns from a reward model trained on them, and never sees the rule. The score is 1 for "
        "one word, and a fortieth less for each further word, on eight topics that do not occur in training.",
        "eval/held_out/score_mean",
        {"DPO": Way("brevity_dpo"), "PPO with the reward model": Way("brevity_ppo")},
        prepare,
    ),
    "gsm8k": Page(
        "SmolLM2-135M-Instruct is fine-tuned on GSM8K",
        "Grade-school mathematics: one epoch of supervised fine-tuning on the training text. " + GSM8K_SCORE,
        "eval/test/avg@1",
        {"SFT": Way("gsm8k_sft", exported="gsm8k-sft")},
    ),
    "gsm8k-dapo": Page(
        "SmolLM2-135M-Instruct and GSM8K by DAPO",
        "Grade-school mathematics: one epoch of supervised fine-tuning on worked answers with at most two "
        "calculations, then DAPO on the same questions. The page of `learn gsm8k` has the model's score before. The "
        "effect of DAPO on sampled answers stands below the samples. " + GSM8K_SCORE,
        "eval/test/avg@1",
        {
            "SFT": Way("gsm8k_sft", (FEW_STEPS, *ONLY_AFTERWARDS), exported="gsm8k-sft-few"),
            "DAPO": Way("gsm8k_dapo"),
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("overrides", nargs="*", help="as braid train takes them, for every run")
    arguments = parser.parse_args()
    fetch()
    write_tasks()
    page = STUDIES[arguments.study]
    if page.prepare:
        page.prepare()
    runs = {
        (name, seed): run(way, seed, f"{arguments.study}-{name}-{seed}".lower().replace(" ", "-"), arguments.overrides)
        for name, way in page.ways.items()
        for seed in way.seeds
    }
    write_page(arguments.study, page, runs)


def run(way: Way, seed: int, name: str, overrides: list[str]) -> Path:
    """Return the folder of a finished run; its `measured.json` holds its duration and its peak memory."""
    folder = FOLDER / name
    if not (folder / "measured.json").is_file():
        command = [
            sys.executable,
            "-m",
            "braidrl.cli",
            "train",
            str(HERE / f"{way.config}.yaml"),
            *way.changed,
            *overrides,
        ]
        started = time.monotonic()
        peak = peak_gib([*command, f"name={name}", f"seed={seed}"])
        measured = {"minutes": (time.monotonic() - started) / 60, "peak_gib": peak}
        (folder / "measured.json").write_text(json.dumps(measured))
    if way.exported and not (FOLDER / way.exported).is_dir():
        export_model(folder, FOLDER / way.exported)
    return folder


def peak_gib(command: list[str]) -> float:
    """Run a command and return the peak memory of its process, in GiB. Raises CalledProcessError if it fails.

    `os.wait4` reports this one child, while `getrusage` reports the maximum over all children. The result is never
    below this process's own memory, because a child begins as a copy of it.
    """
    child = subprocess.Popen(command)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return used.ru_maxrss / 2**20


def write_page(study: str, page: Page, runs: dict[tuple[str, int], Path]) -> None:
    """Write a study's page: a table and curves of all runs, and samples of the first run before and after."""
    rows: list[list[Any]] = []
    curves: dict[str, Curve] = {}
    for (name, seed), folder in runs.items():
        points = curve(read_metrics(folder), page.score)
        measured = json.loads((folder / "measured.json").read_text())
        curves[f"{name}, seed {seed}"] = points
        rows.append(row(name, seed, points, measured))
    write_curves(PAGES / f"smollm2-{study}.svg", page.title, curves)
    header = ["", "seed", "score at the start", "at the end", "gained", "steps", "minutes", "peak memory, GiB"]
    shown = next(run for run, folder in runs.items() if len(evaluations(folder)) > 1)
    text = [
        f"# {page.title}\n",
        f"    python -m examples.smollm2.learn {study}\n",
        f"{page.text}\n",
        table(header, rows),
        f"![{page.title}](smollm2-{study}.svg)\n",
        f"Responses to held-out questions before and after {shown[0]}, seed {shown[1]}:\n",
        table(["question", "before", "after"], samples(runs[shown])),
    ]
    write_markdown(PAGES / f"smollm2-{study}.md", "\n".join(text))


def row(name: str, seed: int, points: Curve, measured: dict[str, float]) -> list[Any]:
    """Return a run's line of the table; a run with one evaluation has a final score only."""
    (_, start), (steps, end) = points[0], points[-1]
    scores = ["", f"{end:.3f}", ""] if len(points) == 1 else [f"{start:.3f}", f"{end:.3f}", f"{end - start:+.3f}"]
    return [name, seed, *scores, steps, f"{measured['minutes']:.0f}", f"{measured['peak_gib']:.1f}"]


def evaluations(folder: Path) -> list[Path]:
    """Return a run's recorded evaluations, in the order of their steps."""
    return sorted(folder.glob("rollouts/eval-*-step-*.parquet"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))


def samples(folder: Path) -> list[list[str]]:
    """Return questions with the first response to each at the first evaluation and at the last one."""
    recorded = evaluations(folder)
    before, after = (first_responses(path) for path in (recorded[0], recorded[-1]))
    chosen = list(before)[:: max(1, len(before) // SHOWN)][:SHOWN]
    return [[as_cell(text) for text in (question, before[question], after[question])] for question in chosen]


def first_responses(path: Path) -> dict[str, str]:
    """Return the first response to each question of an evaluation, by the question."""
    return {question: text for question, text, sample in recorded_responses(path) if sample == 0}


def as_cell(text: str) -> str:
    """Return a text as a one-line table cell."""
    line = " ".join(text.split()).replace("|", "¦").replace("`", "'")
    return f"`{line or ' '}`"


if __name__ == "__main__":
    main()

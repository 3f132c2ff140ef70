"""Shared parts of the studies: data, the initial model, runs that are not repeated, and pages."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import Curve, Lines, Mean, curve, write_curves, write_markdown
from task import demonstrations, problems, questions, write_jsonl, write_model

from braidrl.config import Config, parse_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model
from braidrl.runtimes.saving.folders import latest_checkpoint, run_config

HERE = Path(__file__).parent
HELD_OUT, TRAINED, DIGITS = 100, 4000, 2
SCORE = "eval/held_out/avg@4"
START = 1
"""Seed of the data and of the initial model."""
SEEDS = (0, 1, 2)
STEPS = 60
IMITATION = {"qwen3_moe": 600}
"""Steps in which a family imitates the teacher, if not 200: an expert sees a quarter of the tokens."""
RESPONSE_TOKENS = 40

Tree = dict[str, Any]
Numbers = dict[str, float]
"""Results of a study, by name."""


@dataclass(frozen=True)
class Teacher:
    """The teacher whose answers a study's model imitates first."""

    name: str
    mistakes: float = 0.55
    """Share of answers with a mistake."""
    rambling: float = 0.0
    """Share of answers that repeat their working several times."""
    rambling_mistakes: float | None = None
    """Share of answers with a mistake among those that repeat their working, if it differs."""

    def answers(self, pairs: Sequence[tuple[int, int]]) -> Iterator[dict[str, str]]:
        """Return the teacher's answers to some sums."""
        if self.rambling_mistakes is None:
            return demonstrations(pairs, self.mistakes, START, self.rambling)
        short = demonstrations(pairs, self.mistakes, START)
        long = demonstrations(pairs, self.rambling_mistakes, START, rambling=1.0)
        source = random.Random(START)
        return (b if source.random() < self.rambling else a for a, b in zip(short, long, strict=True))


CARELESS = Teacher("careless")
RAMBLING = Teacher("rambling", rambling=0.4)


class Study:
    """A study's folder of data and runs, and its pages."""

    def __init__(self, folder: Path, pages: Path, quick: bool = False, seeds: Sequence[int] = SEEDS) -> None:
        """Initialize a study; `quick` shortens every run to a few steps, which tests the study and not the
        algorithms.
        """
        self.folder, self.pages, self.quick, self.seeds = folder, pages, quick, seeds

    def run(self, name: str, tree: Mapping[str, Any]) -> Path:
        """Return the folder of a finished run: an existing one, a resumed one or a new one."""
        config = parse_config({**self.shortened(tree), "name": name, "output": str(self.folder), "device": "cpu"})
        folder = self.folder / name
        if finished(folder, config):
            return folder
        if folder.is_dir() and latest_checkpoint(folder):
            return train(run_config(folder), resume=folder)
        shutil.rmtree(folder, ignore_errors=True)
        return train(config)

    def shortened(self, tree: Mapping[str, Any]) -> Tree:
        """Return the configuration of a run, shortened to a few steps with `quick`."""
        if not self.quick:
            return dict(tree)
        evaluation, algorithm = dict(tree.get("evaluation", {"every": 0})), dict(tree.get("algorithm", {}))
        if evaluation["every"]:
            evaluation |= {"every": 2, "max_prompts": 8}
        if tree["flow"] == "dapo":
            # An untrained model has no group with both right and wrong answers.
            algorithm["dynamic_sampling"] = False
        trainer = {**tree["trainer"], "steps": 2, "prompts_per_step": 8, "warmup_steps": 0}
        return {**tree, "algorithm": algorithm, "trainer": trainer, "evaluation": evaluation}

    def page(self, name: str, title: str, text: str) -> None:
        """Write a page that begins with the command that writes it."""
        self.pages.mkdir(parents=True, exist_ok=True)
        command = f"    python examples/arithmetic/studies.py {name}"
        if tuple(self.seeds) != SEEDS:
            command += f" --seeds {' '.join(map(str, self.seeds))}"
        write_markdown(self.pages / f"{name}.md", f"# {title}\n\n{command}\n\n{text}")

    def curves(self, name: str, title: str, curves: Mapping[str, Curve], limit: float | None = None) -> str:
        """Draw curves beside the page; return the Markdown that shows them."""
        write_curves(self.pages / f"{name}.svg", title, curves, limit)
        return f"![{title}]({name}.svg)\n"

    def warm_model(self, teacher: Teacher = CARELESS, family: str = "qwen3") -> Path:
        """Return the data files and the initial model of a family, which has imitated a teacher."""
        name = teacher.name if family == "qwen3" else f"{teacher.name}-{family}"
        folder, examples = self.folder / f"{name}-model", self.folder / f"{teacher.name}.jsonl"
        if not examples.is_file():
            self.write_data(examples, teacher)
        if folder.is_dir():
            return folder
        untrained = self.folder / ("untrained" if family == "qwen3" else f"untrained-{family}")
        write_model(untrained, seed=START, family=family)
        run = self.run(
            f"{name}-start",
            {
                "flow": "sft",
                "seed": START,
                "model": str(untrained),
                "data": {"train": str(examples)},
                "rollout": {"samples_per_prompt": 1, "max_response_tokens": 2 * RESPONSE_TOKENS},
                "trainer": {
                    "steps": IMITATION.get(family, 200),
                    "prompts_per_step": 256,
                    "learning_rate": 3e-3,
                    "schedule": "linear",
                    "warmup_steps": 20,
                    "checkpoint_every": 50,
                },
            },
        )
        export_model(run, folder)
        return folder

    def write_data(self, examples: Path, teacher: Teacher) -> None:
        """Write training sums, held-out sums and a teacher's answers."""
        pairs = problems(HELD_OUT + TRAINED, DIGITS, seed=START)
        held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT:]
        write_jsonl(self.folder / "held_out.jsonl", questions(held_out))
        write_jsonl(self.folder / "train.jsonl", questions(trained))
        write_jsonl(examples, teacher.answers(trained))

    def policy(
        self,
        flow: str,
        algorithm: Tree,
        seed: int = 0,
        teacher: Teacher = CARELESS,
        family: str = "qwen3",
        **more: Any,
    ) -> Tree:
        """Return the configuration that improves the warm model on sums, with evaluation on held-out ones."""
        tree: Tree = {
            "flow": flow,
            "algorithm": algorithm,
            "seed": seed,
            "model": str(self.warm_model(teacher, family)),
            "data": {
                "train": str(self.folder / "train.jsonl"),
                "eval": {"held_out": str(self.folder / "held_out.jsonl")},
            },
            "reward": {"verify": "gsm8k"},
            "rollout": {"samples_per_prompt": 8, "max_response_tokens": RESPONSE_TOKENS, "slots": 128},
            "trainer": {
                "steps": STEPS,
                "prompts_per_step": 32,
                "learning_rate": 5e-4,
                "warmup_steps": 5,
                "checkpoint_every": 20,
            },
            "evaluation": {"every": 10, "samples": 4, "top_p": 1.0},
        }
        return {**tree, **more}


def finished(folder: Path, config: Config) -> bool:
    """Return True if the run has done all its steps and kept its models."""
    if latest_checkpoint(folder) is None:
        return False
    return bool(read_metrics(folder)[-1]["step"] >= config.trainer.steps)


def over_seeds(study: Study, name: str, tree: Callable[[int], Tree]) -> list[Lines]:
    """Return the metrics of a run for each seed; `tree` returns a seed's configuration."""
    return [read_metrics(study.run(f"{name}-{seed}", tree(seed))) for seed in study.seeds]


def final_scores(runs: Sequence[Lines]) -> list[str]:
    """Return two cells of a table: the mean of the last held-out scores with its interval, and the single scores."""
    finals = [curve(lines, SCORE)[-1][1] for lines in runs]
    return [Mean.of(finals).text(".3f"), " ".join(f"{final:.2f}" for final in finals)]

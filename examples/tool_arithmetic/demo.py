"""`python -m examples.tool_arithmetic.demo`: learn to call the right tool.

random model ──SFT on a teacher that often takes any tool──▶ right two times in three ──GRPO──▶ right nearly always
"""

from __future__ import annotations

import shutil
from pathlib import Path

from examples.small_model import make_tokenizer, write_jsonl, write_model
from examples.tool_arithmetic.task import CALLS, MARKS, TEMPLATE, answers, demonstrations, problems, question
from examples.two_stages import run_demo


def prepare(folder: Path, seed: int) -> None:
    """Write data and an untrained model."""
    shutil.rmtree(folder, ignore_errors=True)
    questions = [question(*problem) for problem in problems(264, seed)]
    write_jsonl(folder / "held_out.jsonl", questions[:64])
    write_jsonl(folder / "train.jsonl", questions[64:])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(1000, seed + 1))
    write_jsonl(folder / "answers.jsonl", answers(1000, seed + 1))
    phrases = [*CALLS, ', "b":', "}}</tool_call>"]
    words = " ".join(["what is plus times", *map(str, range(82))])
    write_model(folder / "untrained", make_tokenizer(phrases, words, TEMPLATE, MARKS), seed)


if __name__ == "__main__":
    run_demo(Path(__file__).parent, prepare, "eval/held_out/avg@4", "Right answers")

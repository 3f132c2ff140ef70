"""`python -m examples.summaries.demo`: learn to take notes of a text that is read part by part.

random model ──SFT on a reader that errs in half of the turns──▶ seldom right ──GRPO──▶ right nearly always
"""

from __future__ import annotations

import shutil
from pathlib import Path

from examples.small_model import make_tokenizer, write_jsonl, write_model
from examples.summaries.task import WORDS, demonstrations, texts
from examples.two_stages import run_demo


def prepare(folder: Path, seed: int) -> None:
    """Write data and an untrained model."""
    shutil.rmtree(folder, ignore_errors=True)
    examples = list(texts(1064, seed))
    write_jsonl(folder / "held_out.jsonl", examples[:64])
    write_jsonl(folder / "train.jsonl", examples[64:])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(1000, seed + 1))
    write_model(folder / "untrained", make_tokenizer([], WORDS), seed)


if __name__ == "__main__":
    run_demo(Path(__file__).parent, prepare, "eval/held_out/avg@4", "Right answers")

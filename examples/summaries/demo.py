"""`python -m examples.summaries.demo`: learns to take notes of a text that it reads part by part.

random model ──SFT on a reader who errs in half of the turns──▶ seldom right ──GRPO──▶ right nearly always
"""

from __future__ import annotations

import shutil
from pathlib import Path

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.export import export_model
from braidrl.runtimes.run import train
from examples.small_model import make_tokenizer, write_jsonl, write_model
from examples.summaries.task import WORDS, demonstrations, texts

HERE = Path(__file__).parent
SCORE = "eval/held_out/avg@4"


def prepare(folder: Path, seed: int) -> None:
    """Data and a model that knows nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    examples = list(texts(1064, seed))
    write_jsonl(folder / "held_out.jsonl", examples[:64])
    write_jsonl(folder / "train.jsonl", examples[64:])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(1000, seed + 1))
    write_model(folder / "untrained", make_tokenizer([], WORDS), seed)


def main() -> None:
    folder = Path("build/summaries")
    prepare(folder, seed=0)
    export_model(train(load_config(HERE / "warm_start.yaml")), folder / "model")
    run = train(load_config(HERE / "config.yaml"))
    scores = [line[SCORE] for line in read_metrics(run) if line.get(SCORE) is not None]
    print(f"Right answers rose from {scores[0]:.2f} to {scores[-1]:.2f}; sample responses: {run / 'report.html'}")


if __name__ == "__main__":
    main()

"""`python -m examples.placements.models`: write a small policy, a reward model and prompts for the configurations of
this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from examples.small_model import make_tokenizer, write_jsonl, write_model


def write(folder: Path) -> None:
    """Write `model`, `reward-model` and `train.jsonl` into a folder; both models have random weights."""
    tokenizer = make_tokenizer([], " ".join(map(str, range(100))) + " + =")
    write_model(folder / "model", tokenizer, seed=0, layers=4)
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.config.pad_token_id = tokenizer.eos_token_id
    scorer.save_pretrained(folder / "reward-model")
    tokenizer.save_pretrained(folder / "reward-model")
    write_jsonl(folder / "train.jsonl", ({"prompt": f"{a} + {b} ="} for a in range(10) for b in range(10)))


if __name__ == "__main__":
    write(Path(*sys.argv[1:] or ["build/placements"]))

"""A tokenizer with more tokens than the model's embedding is reported with both sizes, and refused where such a token
occurs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from braidrl.cli.dry_run import dry_run
from braidrl.errors import UserError
from tests.tiny import MODELS, TOKENIZER, Workshop, sums, write_jsonl

SIZE, WORD = len(TOKENIZER), "<tool>"


def model_with_one_more_token(workshop: Workshop, **special: str) -> Path:
    folder = workshop.folder / "model"
    shutil.copytree(workshop.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(workshop.model)
    tokenizer.add_tokens([WORD])
    for name, word in special.items():
        setattr(tokenizer, name, word)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_token_beyond_the_embedding_in_the_data_is_refused_with_both_sizes(workshop: Workshop) -> None:
    assert MODELS["qwen3"].vocab_size == SIZE
    model = model_with_one_more_token(workshop)
    records = sums(4)
    records[2]["prompt"] += WORD
    data = write_jsonl(workshop.folder / "beyond.jsonl", records)
    expected = rf"beyond.jsonl, line 3:.* {SIZE + 1} .*{SIZE}:.*'<tool>'"
    for sections in (
        {"data": {"train": str(data)}},
        {"data": {"train": str(workshop.data), "eval": {"test": str(data)}}},
    ):
        with pytest.raises(UserError, match=expected):
            workshop.run(model=str(model), **sections)
        with pytest.raises(UserError, match=expected):
            dry_run(workshop.config(model=str(model), **sections))


def test_an_end_of_sequence_beyond_the_embedding_is_refused(workshop: Workshop) -> None:
    model = model_with_one_more_token(workshop, eos_token=WORD)
    with pytest.raises(UserError, match=rf"eos_token_id .* {SIZE},.* 0 to {SIZE - 1}"):
        workshop.run(model=str(model))


def test_unused_tokens_beyond_the_embedding_are_reported_by_run_and_dry_run(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    config = workshop.config(model=str(model_with_one_more_token(workshop)), trainer={"steps": 1})
    line = f"the tokenizer has {SIZE + 1} tokens and the embedding of actor has {SIZE}"
    console = Console(record=True, width=200)
    dry_run(config, console)
    assert line in re.sub(r"\s+", " ", console.export_text())
    workshop.run(model=str(config.model), trainer={"steps": 1})
    assert line in capfd.readouterr().err


def beyond(texts: list[str], example: dict[str, object]) -> object:
    """An environment whose answer has a token that the model lacks."""
    from braidrl.agents.turns import Observation

    return Observation(WORD, done=False)


def test_an_environments_token_beyond_the_embedding_ends_in_one_line(workshop: Workshop) -> None:
    model = model_with_one_more_token(workshop)
    rollout = {"environment": f"{__file__}:beyond", "max_sequence_tokens": 60}
    with pytest.raises(UserError, match=rf"token {SIZE} .*embedding of {SIZE} tokens"):
        workshop.run(model=str(model), rollout=rollout)

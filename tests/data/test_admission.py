from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import PromptLoader, as_rows, eval_rows, join_texts
from braidrl.data.prompts import LoadedSource, load_source
from braidrl.data.rows import Rows
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
Load = Callable[..., LoadedSource]


@pytest.fixture
def load(write_jsonl: Callable[..., Path], plain_tokenizer: Any) -> Load:
    def load(records: list[Any], **settings: Any) -> LoadedSource:
        responses = "response" in records[0]
        config = SourceConfig(path=write_jsonl(records, f"{len(records)}.jsonl"), **settings)
        return load_source(
            Reading(config, responses=responses), DataConfig(max_prompt_tokens=64), PromptTemplate(plain_tokenizer)
        )

    return load


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(count)]


def test_each_group_is_its_prompts_samples_one_after_the_other(load: Load, plain_tokenizer: Any) -> None:
    loader = PromptLoader([load(questions(5)), load(questions(3), weight=2.0)], seed=4)
    expected = loader.peek(range(6))
    rows = as_rows(loader.peek(loader.advance(6)), 2)
    assert rows.uids() == [(a.source, a.number, sample) for a in expected for sample in (0, 1)]
    assert rows["prompt_length"].equal(rows["prompt"].lengths)
    for row in range(len(rows)):
        admitted = expected[row // 2]
        assert plain_tokenizer.decode(rows["prompt"][row]) == admitted.example.prompt
        assert rows["metadata"][row] == {
            "prompt": admitted.example.prompt,
            "answer": admitted.example.answer,
            "level": admitted.example.metadata["level"],
        }
    assert {name: rows[name].dtype for name in rows.index} == dict.fromkeys(
        ("source", "group", "sample", "prompt_length"), torch.int64
    )
    assert rows["prompt"].values.dtype == torch.int64
    assert "response" not in rows


def test_groups_are_numbered_through_the_whole_run(load: Load) -> None:
    loader = PromptLoader([load(questions(3))])
    parts = [as_rows(loader.peek(loader.advance(groups)), 2) for groups in (2, 0, 3)]
    rows = Rows.cat(parts)
    assert rows["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(set(rows.uids())) == 10


def test_responses_are_a_column_where_they_were_read(load: Load, plain_tokenizer: Any) -> None:
    source = load([{"prompt": "a", "response": "12"}, {"prompt": "b", "response": ""}])
    rows = as_rows(PromptLoader([source], shuffle=False).peek(range(2)), 1)
    end = plain_tokenizer.eos_token_id
    assert rows["response"].tolist() == [[*plain_tokenizer("12")["input_ids"], end], [end]]
    assert rows["response"].values.dtype == torch.int64


def test_ranks_that_admit_slices_together_admit_the_whole_batch(load: Load) -> None:
    loader = PromptLoader([load(questions(9))], seed=1)
    slices = [as_rows(loader.peek(range(rank, 8, 2)), 3) for rank in (0, 1)]
    together, alone = Rows.cat(slices).ordered(), as_rows(loader.peek(loader.advance(8)), 3)
    assert together.uids() == alone.uids()
    assert together["prompt"].tolist() == alone["prompt"].tolist()
    assert list(together["metadata"].values) == list(alone["metadata"].values)


def test_evaluation_has_every_prompt_in_file_order(load: Load) -> None:
    source = load(questions(4))
    rows = eval_rows(source, 2)
    assert rows.uids() == [(0, group, sample) for group in range(4) for sample in range(2)]
    assert [m["answer"] for m in rows["metadata"].values] == ["1", "1", "2", "2", "3", "3", "4", "4"]
    assert eval_rows(source, 1, max_prompts=3)["group"].tolist() == [0, 1, 2]
    assert eval_rows(source, 1, max_prompts=9, number=2).uids()[-1] == (2, 3, 0)


def test_pretraining_text_depends_on_the_row_and_never_repeats_within_an_epoch(load: Load) -> None:
    rows = as_rows(PromptLoader([load(questions(4))]).peek(range(4)), 2)
    texts = PromptLoader([load([{"text": f"text {i}"} for i in range(8)], prompt_field="text")], seed=9)
    joined = join_texts(rows, texts, 2)
    assert len({tuple(text) for text in joined["ptx_tokens"].tolist()}) == 8
    order = [5, 0, 3]
    alone = join_texts(rows.take(order), texts, 2)
    assert alone["ptx_tokens"].tolist() == joined.take(order)["ptx_tokens"].tolist()


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the shared GSM8K files are not beside this checkout")
def test_real_gsm8k_prompts_are_admitted(chat_tokenizer: Any) -> None:
    config = SourceConfig(path=GSM8K / "test.jsonl", prompt_field="question")
    source = load_source(Reading(config), DataConfig(max_prompt_tokens=300), PromptTemplate(chat_tokenizer))
    assert source.facts.read == 1319 and 0 < source.dropped < 1319
    rows = as_rows(PromptLoader([source], seed=2).peek(range(4)), 8)
    assert len(rows) == 32
    assert int(rows["prompt_length"].max()) <= 300
    for row in range(0, 32, 8):
        metadata = rows["metadata"][row]
        assert metadata["prompt"] in chat_tokenizer.decode(rows["prompt"][row])
        assert "####" in metadata["answer"]

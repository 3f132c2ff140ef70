from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.prompts import load_eval, load_source, load_train
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

Write = Callable[..., Path]


def test_prompts_that_are_too_long_are_dropped_and_counted(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": "x" * length} for length in (3, 5, 4, 9, 1)])
    source = load_source(
        Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=4), PromptTemplate(plain_tokenizer)
    )
    assert [source.prompt(i).tolist() for i in range(len(source))] == [
        plain_tokenizer("x" * length)["input_ids"] for length in (3, 4, 1)
    ]
    assert [e.line for e in source] == [1, 3, 5]
    assert (source.facts.read, source.dropped) == (5, 2)
    assert re.match(rf"{path}: 5 prompts, 2 .*data.max_prompt_tokens", source.report())


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SHOWS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% "
    "endfor %}"
)


@pytest.mark.parametrize("shown", [False, True])
def test_tools_that_the_chat_template_does_not_show_are_reported(
    shown: bool, write_jsonl: Write, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shown:
        monkeypatch.setattr(chat_tokenizer, "chat_template", SHOWS)
    path = write_jsonl([{"prompt": "a"}, {"prompt": "b", "tools": [TOOL]}])
    source = load_source(
        Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=100), PromptTemplate(chat_tokenizer)
    )
    assert ("does not show `tools` to the model; line 2" in source.report()) is not shown


def test_a_file_without_any_remaining_example_is_refused(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": "x" * length} for length in (30, 20)])
    with pytest.raises(UserError) as caught:
        load_source(Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=16), PromptTemplate(plain_tokenizer))
    assert str(caught.value).startswith(f"{path}: ")
    assert "data.max_prompt_tokens=16; the shortest has 20 tokens" in str(caught.value)


def test_responses_stay_with_their_prompts_when_some_are_dropped(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": p, "response": r} for p, r in (("aa", "1"), ("too long", "2"), ("b", "34"))])
    source = load_source(
        Reading(SourceConfig(path=path), responses=True),
        DataConfig(max_prompt_tokens=3),
        PromptTemplate(plain_tokenizer),
    )
    responses = [source.response(i)[0] for i in range(2)]
    assert [plain_tokenizer.decode(r, skip_special_tokens=True) for r in responses] == ["1", "34"]
    without = load_source(
        Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=3), PromptTemplate(plain_tokenizer)
    )
    assert without.response(0) is None


def test_a_prompt_that_the_template_refuses_is_named_by_its_line(write_jsonl: Write, chat_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": [{"role": "wizard", "content": "b"}]}])
    with pytest.raises(UserError) as caught:
        load_source(Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=100), PromptTemplate(chat_tokenizer))
    assert re.match(rf"{path}, line 2: .*chat template .*: unknown role$", str(caught.value))


def test_a_prompt_without_tokens_is_named_by_its_line(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": [{"role": "user", "content": ""}]}])
    with pytest.raises(UserError) as caught:
        load_source(
            Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=100), PromptTemplate(plain_tokenizer)
        )
    assert re.match(rf"{path}, line 2: .*no token of this prompt; write", str(caught.value))


def test_more_prompts_than_one_batch_keep_their_order(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([{"prompt": str(i)} for i in range(1100)])
    source = load_source(
        Reading(SourceConfig(path=path)), DataConfig(max_prompt_tokens=9), PromptTemplate(plain_tokenizer)
    )
    assert [plain_tokenizer.decode(source.prompt(i)) for i in range(1100)] == [str(i) for i in range(1100)]


def test_the_configuration_names_the_files(write_jsonl: Write, chat_tokenizer: Any) -> None:
    one, two = write_jsonl([{"prompt": "a"}], "one.jsonl"), write_jsonl([{"q": "b"}], "two.jsonl")
    data = DataConfig(
        train=[SourceConfig(path=one), SourceConfig(path=two, prompt_field="q", weight=3.0)],
        eval={"held_out": SourceConfig(path=two, prompt_field="q")},
        system_prompt="S",
    )
    train = load_train(data, chat_tokenizer)
    assert [source.weight for source in train] == [1.0, 3.0]
    held_out = load_eval(data, chat_tokenizer)["held_out"]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(train[1].prompt(0)) == chat_tokenizer.decode(held_out.prompt(0)) == expected
    with pytest.raises(UserError, match=r"data.train .*.jsonl or .parquet file"):
        load_train(DataConfig(), chat_tokenizer)

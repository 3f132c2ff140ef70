"""Peculiarities of public data sets, from reports about other frameworks, each with further inputs of the same kind."""

from __future__ import annotations

import datetime
import gc
import json
import runpy
import shutil
from collections.abc import Callable
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from braidrl.agents.turns import TurnTemplate
from braidrl.algorithms.ragged import Ragged
from braidrl.config import DataConfig, SourceConfig
from braidrl.data.chat import end_ids_of
from braidrl.data.loader import PromptLoader, as_rows
from braidrl.data.prompts import LoadedSource, load_source, load_train
from braidrl.data.rows import Rows
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError
from braidrl.observe.report import write_report
from braidrl.observe.rollouts import rollout_path
from braidrl.rewards.math_equivalence import equivalent
from braidrl.rewards.verify import responses
from tests.agents.chat import STYLES
from tests.data.shared_cases import FOLDER, byte_tokenizer, llama, needs_cases, qwen
from tests.data.shared_cases import PLAIN as PLAIN_TEMPLATE
from tests.tiny import Workshop

Write = Callable[..., Path]
USER = {"role": "user", "content": "hi"}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(records: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the inputs that are not text, written by the cases' own program."""
    folder = tmp_path_factory.mktemp("cases")
    shutil.copy(FOLDER / "make.py", folder)
    runpy.run_path(str(folder / "make.py"))
    return folder


def load(path: Path, tokenizer: Any, responses: bool = False, pairs: bool = False, **settings: Any) -> LoadedSource:
    template = PromptTemplate(tokenizer, arguments=settings.pop("arguments", {}))
    reading = Reading(SourceConfig(path=path, **settings), responses=responses, pairs=pairs)
    return load_source(reading, DataConfig(max_prompt_tokens=4096), template)


def prompts(path: Path, tokenizer: Any, **settings: Any) -> list[str]:
    source = load(path, tokenizer, **settings)
    return [tokenizer.decode(source.prompt(i)) for i in range(len(source))]


def trained(path: Path, tokenizer: Any, which: str = "response", **settings: Any) -> list[tuple[str, str]]:
    """Return, for each example, prompt and response with `|` around the trained parts."""
    source, result = load(path, tokenizer, **{"responses": which == "response", "pairs": True} | settings), []
    for i in range(len(source)):
        ids, mask = source.response(i, which)  # type: ignore[misc]
        parts = [
            tokenizer.decode([token for token, _ in group])
            for is_trained, group in groupby(zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
            if is_trained
        ]
        result.append((tokenizer.decode(source.prompt(i)) + tokenizer.decode(ids), "|".join(parts)))
    return result


def sft(path: Path, tokenizer: Any, **settings: Any) -> list[tuple[str, str]]:
    return trained(path, tokenizer, responses=True, pairs=False, **settings)


# Number 2: several boxes.


@needs_cases
def test_the_last_box_of_a_response_counts_in_the_shared_cases() -> None:
    for line in (FOLDER / "math_answers.jsonl").read_text().splitlines():
        case = json.loads(line)
        assert equivalent(case["response"], case["answer"]) is case["right"], case["response"]


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"\boxed{1}. No: \boxed{2} and \boxed{3}", r"\{2,3\}", True),
        (r"One root is \boxed{2}. The other root is \boxed{3}.", r"\{2,3\}", True),
        (r"$\boxed{2}$, $\boxed{3}$ and $\boxed{4}$", "2,3,4", True),
        (r"\boxed{2} and \boxed{4}", r"\{2,3\}", False),
        (r"\boxed{3} or \boxed{5}", "5", False),
        (r"\boxed{3}, so \boxed{5}", "5", True),
        (r"\boxed{5}. Then again \boxed{5", "5", True),
        (r"\boxed{\frac{1}{2}} so $x=\boxed{\frac{3}{4}}$", "3/4", True),
        (r"$$\boxed{5}$$ and then \(\boxed{6}\)", "5", False),
        (r"\boxed{5} ... \boxed{\text{none}}", "5", False),
        (r"\boxed {3} then \boxed{(1,2)}", "(1,2)", True),
    ],
)
def test_of_several_boxes_the_last_answer_counts(response: str, answer: str, right: bool) -> None:
    assert equivalent(response, answer) is right


# Number 3: prompts that end with the beginning of an assistant's turn.


@needs_cases
def test_a_prompt_that_begins_the_answer_is_continued_in_the_shared_cases() -> None:
    (text,) = prompts(FOLDER / "prefill.jsonl", qwen())
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>Let me"


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (qwen(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is <"),
        (llama(), "<bos><|start|>user<|end|>\n\nhi<|eot|><|start|>assistant<|end|>\n\nIt is <"),
        (byte_tokenizer(PLAIN_TEMPLATE), "user: hi\nassistant: It is <"),
        (byte_tokenizer(None), "hi\n\nIt is <"),
    ],
)
def test_the_beginning_of_an_answer_is_kept_to_the_letter(write: Write, tokenizer: Any, expected: str) -> None:
    path = write([{"prompt": [USER, {"role": "assistant", "content": "It is <"}]}])
    assert prompts(path, tokenizer) == [expected]


def test_a_template_that_opens_with_a_thought_does_not_open_it_twice(write: Write) -> None:
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE.replace("assistant: {% endif %}", "assistant: <think>\n{% endif %}"))
    path = write([{"prompt": [USER, {"role": "assistant", "content": said}]} for said in ("<think>Let me", "Let me")])
    assert prompts(path, tokenizer) == ["user: hi\nassistant: <think>Let me", "user: hi\nassistant: <think>\nLet me"]


def test_a_call_without_its_result_at_the_end_is_named(write: Write) -> None:
    path = write([{"prompt": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}]}])
    with pytest.raises(UserError, match=r"line 1: .*last message .*call .*tool's"):
        prompts(path, qwen())


# Numbers 4 and 5: nulls that parquet adds, and the forms of calls.


@needs_cases
@pytest.mark.parametrize("calls", ["tojson", "items"])
def test_nulls_that_parquet_adds_are_not_in_the_prompt_of_the_shared_cases(made: Path, calls: str) -> None:
    for text in prompts(made / "tool_calls.parquet", qwen(calls)):
        assert "null" not in text and "None" not in text and ("Paris" in text) != ("CET" in text)


@pytest.mark.parametrize("calls", ["tojson", "items"])
def test_a_conversation_has_the_same_prompt_from_json_and_from_parquet(
    write: Write, tmp_path: Path, calls: str
) -> None:
    schema = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in {
            "weather": {"city": {"type": "string", "enum": ["Paris"]}},
            "time": {"zone": {"type": "string", "deep": {"x": 1}}},
            "now": {},
        }.items()
    ]
    records = [
        {
            "prompt": [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "1", "type": "function", "function": function}],
                },
                {"role": "tool", "name": function["name"], "content": "x"},
            ],
            "tools": [schema[number]],
            "answer": "1",
        }
        for number, function in enumerate(
            [
                CALL,
                {"name": "time", "arguments": {"zone": "CET", "about": {"dst": True, "list": [1, None]}}},
                {"name": "now", "arguments": {}},
            ]
        )
    ]
    expected = prompts(write(records), qwen(calls))
    assert "zone" not in expected[0] and "city" not in expected[1]
    assert prompts(write(records, "data.parquet"), qwen(calls)) == expected
    write(records, "folder/train.parquet")
    assert prompts(tmp_path / "folder", qwen(calls)) == expected
    write(records, "lines/train.jsonl")
    assert prompts(tmp_path / "lines", qwen(calls)) == expected


@needs_cases
@pytest.mark.parametrize("calls", ["tojson", "items"])
def test_all_forms_of_calls_give_one_prompt_in_the_shared_cases(calls: str) -> None:
    texts = prompts(FOLDER / "openai_calls.jsonl", qwen(calls))
    assert len(set(texts)) == 1 and len(texts) == 3 and "Paris" in texts[0] and "12C" in texts[0]


@pytest.mark.parametrize("calls", ["tojson", "items"])
def test_other_forms_of_messages_give_one_prompt_too(write: Write, calls: str) -> None:
    text, parts = "see", [{"type": "text", "text": "s"}, {"type": "text", "text": "ee"}]
    forms = [
        {"content": text, "tool_calls": [{"function": CALL}]},
        {"content": parts, "tool_calls": [{"function": {**CALL, "arguments": '{"city":\n"Paris"}'}}], "refusal": None},
        {"content": text, "tool_calls": [{"function": CALL}], "name": None},
    ]
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": [{"type": "text", "text": "1"}]}]
    records = [
        {"prompt": [{**USER, "tool_calls": none}, {"role": "assistant", **form}, result, USER]}
        for form in forms
        for result in results
        for none in (None, [])
    ]
    texts = prompts(write(records), qwen(calls))
    assert len(texts) == 12 and len(set(texts)) == 1
    bad = write(
        [{"prompt": [{"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": "{city"}}]}, USER]}]
    )
    with pytest.raises(UserError, match=r"line 1: message 1 .*'weather' .*JSON"):
        prompts(bad, qwen(calls))


# Number 6: tools and arguments of the template.


@needs_cases
def test_the_template_gets_the_rows_tools_in_the_shared_cases() -> None:
    with_tools, without = prompts(FOLDER / "tools_column.jsonl", qwen())
    assert "weather of a city" in with_tools and "tools" not in without.replace("no tools here", "")


def test_tools_may_be_json_text_and_have_another_field(write: Write) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [{"prompt": "a", "functions": json.dumps(tools)}, {"prompt": "a", "functions": tools}]
    one, other = prompts(write(records), qwen(), tools_field="functions")
    assert one == other and '"name": "f"' in one
    with pytest.raises(UserError, match=r"line 1: 'functions' .*list of functions"):
        prompts(write([{"prompt": "a", "functions": ["f"]}]), qwen(), tools_field="functions")
    assert next(iter(Reading(SourceConfig(path=write([{"prompt": "a", "tools": ["f"]}]))))).metadata == {"tools": ["f"]}


def test_arguments_of_the_template_are_of_the_run_the_source_and_the_row(write: Write) -> None:
    closed = "<think>\n\n</think>\n\n"
    path = write([{"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"enable_thinking": True}}])
    of_run = {"enable_thinking": False}
    assert [text.endswith(closed) for text in prompts(path, qwen())] == [False, False]
    assert [text.endswith(closed) for text in prompts(path, qwen(), arguments=of_run)] == [True, False]
    assert [text.endswith(closed) for text in prompts(path, qwen(), template=of_run)] == [True, False]
    assert [
        t.endswith(closed) for t in prompts(path, qwen(), arguments=of_run, template={"enable_thinking": True})
    ] == [
        False,
        False,
    ]
    data = DataConfig(train=[SourceConfig(path=path)], template=of_run)
    rows = as_rows(PromptLoader(load_train(data, qwen()), shuffle=False).peek(range(2)), 1)
    assert rows["metadata"][1]["chat_template_kwargs"] == {"enable_thinking": True}


# Number 7: columns that are not JSON.


@needs_cases
@pytest.mark.parametrize("name", ["timestamp", "images", "decimal"])
def test_non_json_columns_do_no_harm_in_the_shared_cases(made: Path, tmp_path: Path, name: str) -> None:
    file = made / f"{name}.parquet"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "train.parquet").write_bytes(file.read_bytes())
    (tmp_path / "own.py").write_text(
        "def example(record):\n    seen = record.get('images') or record.get('created') or record['price']\n"
        "    assert not isinstance(seen, (str, int))\n"
        "    return {**record, 'prompt': record['prompt'], 'answer': record['reward_model']['ground_truth']}\n"
    )
    for path in (file, folder):
        for convert in (None, f"{tmp_path}/own.py:example"):
            examples = list(Reading(SourceConfig(path=path, convert=convert)))
            assert [(e.prompt[0]["content"], e.answer) for e in examples] == [(("What is 2+2?"), "4")] * 2  # type: ignore[index]
            assert json.dumps(examples[0].metadata)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (datetime.time(1, 2), "01:02:00"),
        (datetime.timedelta(seconds=3), "0:00:03"),
        (datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "2024-01-01T00:00:00+00:00"),
        (Decimal("0.10"), "0.10"),
        (float("inf"), None),
        ({"a": [b"x", None], "b": b"y", "c": 1}, {"a": [None, None], "c": 1}),
    ],
)
def test_other_non_json_values_are_kept_as_far_as_json_allows(write: Write, value: Any, kept: Any) -> None:
    (example,) = list(Reading(SourceConfig(path=write([{"prompt": "a", "extra": value}], "data.parquet"))))
    assert example.metadata == {"extra": kept}


def test_a_column_of_bytes_is_left_out_and_reported(write: Write) -> None:
    source = load(write([{"prompt": "a", "answer": Decimal("1.5"), "raw": b"x"}], "data.parquet"), byte_tokenizer(None))
    assert source[0].answer == "1.5" and source[0].metadata == {}
    assert source.report().endswith("; column 'raw' left out, for which JSON has no form")


def test_a_conversion_may_return_arrays_and_dates(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import datetime, numpy\ndef example(record):\n    return {'prompt': record['q'], 'answer': numpy.int64(3),\n"
        "            'grid': numpy.ones((1, 2)), 'day': datetime.date(2024, 1, 1), 'lost': object()}\n"
    )
    reading = Reading(SourceConfig(path=write([{"q": "a"}]), convert=f"{tmp_path}/own.py:example"))
    (example,) = reading
    assert (example.answer, example.metadata) == ("3", {"grid": [[1.0, 1.0]], "day": "2024-01-01"})
    assert reading.without_form == ["lost"]


# Number 8: halves of surrogate pairs.


@needs_cases
def test_a_lone_surrogate_is_replaced_in_the_shared_cases(made: Path) -> None:
    source = load(made / "surrogate.jsonl", qwen())
    assert source[0].prompt == "caf�"
    assert source.prompt(0).tolist() == PromptTemplate(qwen()).encode("caf�")


def test_text_is_whole_wherever_it_is_in_a_record(write: Write) -> None:
    half, whole = "\ud83d", "😀"
    messages = [{"role": "user", "content": half}, {"role": "assistant", "content": f"x{half}{whole}"}]
    records = [{"messages": messages, "answer": f"{half}a", f"k{half}": [half, {"deep": "\ude00"}]}]
    source = load(write(records), qwen(), responses=True)
    example = source[0]
    assert (example.answer, example.metadata) == ("�a", {"k�": ["�", {"deep": "�"}]})
    assert sft(write(records), qwen())[0][1].startswith("<think>\n\n</think>\n\nx�😀")
    json.dumps(example.metadata, ensure_ascii=False).encode()


def test_any_tool_output_is_tokenised() -> None:
    for tokenizer in (qwen(), byte_tokenizer(None)):
        turns = TurnTemplate(PromptTemplate(tokenizer))
        said = [[{"role": "tool", "content": text}] for text in ("a\ud83d", "a�")]
        assert turns.following(said[0], 0) == turns.following(said[1], 0)


def test_a_report_of_recorded_halves_is_whole(workshop: Workshop) -> None:
    run = workshop.run(trainer={"steps": 1})
    path = rollout_path(run, 1)
    table = pyarrow.parquet.read_table(path)
    column = pyarrow.array(['{"answer": "\\ud83d"}'] * len(table), pyarrow.large_string())
    changed = table.set_column(table.column_names.index("metadata"), "metadata", column)
    pyarrow.parquet.write_table(changed, path)
    assert "�" in write_report(run).read_text(encoding="utf-8")


# Number 12: special tokens in the text that verifiers get.


@pytest.mark.parametrize(("skips", "expected"), [(False, "<think>a</think>b"), (True, "ab")])
def test_verifiers_see_special_tokens_but_never_ends_and_padding(skips: bool, expected: str) -> None:
    tokenizer = byte_tokenizer(None, "<eos>", pad_token="<pad>")
    ids = tokenizer("<think>a</think>b<eos><pad><pad><|eot|>")["input_ids"]
    ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>"))
    tokens = Ragged.from_rows([ids], torch.int64)
    rows = Rows({"tokens": tokens, "action_mask": tokens.with_values(torch.ones(len(ids), dtype=torch.bool))})
    assert responses(rows, tokenizer, ends, skips) == [expected]


# Number 13: tables are cached only if all code that they depend on is known.


def test_results_of_a_conversion_without_a_version_are_not_cached(write: Write, tmp_path: Path) -> None:
    path, cache = write([{"q": str(i)} for i in range(9)]), tmp_path / "cache"
    (tmp_path / "words.py").write_text("WORD = 'one'\n")
    code = (
        "import sys\nsys.path.insert(0, {folder!r})\nimport words\ndef example(record):\n    return {{'prompt': "
        "words.WORD}}\n"
    )
    (tmp_path / "own.py").write_text(code.format(folder=str(tmp_path)))
    source = SourceConfig(path=path, convert=f"{tmp_path}/own.py:example")
    data = DataConfig(train=[source], in_memory=2, cache=cache)

    def first(data: DataConfig) -> Any:
        gc.collect()
        return load_train(data, qwen())[0][0].prompt

    import sys

    try:
        assert first(data) == "one" and not cache.exists()
        # The module that the conversion imports has changed; the conversion's own file has not.
        sys.modules["words"].WORD = "two"  # type: ignore[attr-defined]
        assert first(data) == "two" and not cache.exists()
        versions = [source.model_copy(update={"convert_version": version}) for version in ("1", "1", "2")]
        for version, word, seen in zip(versions, ("three", "four", "five"), ("three", "three", "five"), strict=True):
            sys.modules["words"].WORD = word  # type: ignore[attr-defined]
            assert first(data.model_copy(update={"train": [version]})) == seen
    finally:
        sys.modules.pop("words", None)
        sys.path.remove(str(tmp_path))


# Number 14: tokens that a tokenizer adds to a plain prompt.


@pytest.mark.parametrize("text", ["ab", "<bos>ab"])
def test_a_plain_prompt_has_one_beginning_and_no_end(write: Write, text: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(None, "<eos>", bos_token="<bos>")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain = tokenizer("ab")["input_ids"]
    for single in ("<bos> $A <eos>", "$A <eos>", "<bos> $A", "<bos> <bos> $A"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<bos>", bos), ("<eos>", eos)]
        )
        source = load(write([{"prompt": text, "response": "c"}]), tokenizer, responses=True)
        opens = "<bos>" in single or "<bos>" in text
        assert source.prompt(0).tolist() == [*([bos] if opens else []), *plain]
        assert source.response(0)[0].tolist() == [*tokenizer("c", add_special_tokens=False)["input_ids"], eos]  # type: ignore[index]


def test_a_response_that_ends_already_gets_no_second_end(write: Write) -> None:
    tokenizer = qwen()
    assert sft(write([{"prompt": "a", "response": "b<|im_end|>"}]), tokenizer)[0][1] == "b<|im_end|>"


# Number 15: several end tokens.


def test_ends_come_from_both_files_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    tokenizer = llama()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<eos>", "<|eot|>", "<|im_end|>", "<pad>")}
    assert set(end_ids_of(tmp_path, tokenizer)) == {ids["<eos>"], ids["<|eot|>"]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": ids["<|im_end|>"]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<eos>"], ids["<pad>"]]}))
    assert set(end_ids_of(tmp_path, tokenizer)) == set(ids.values())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert set(end_ids_of(tmp_path, byte_tokenizer(PLAIN_TEMPLATE))) == {
        ids[n] for n in ("<|im_end|>", "<eos>", "<pad>")
    }


def test_given_responses_end_as_the_chat_template_closes_turns(write: Write) -> None:
    assert sft(write([{"prompt": "a", "response": "b"}]), llama())[0][1] == "b<|eot|>"


# Number 16: supervised and preference sets in the hub's forms.


@needs_cases
def test_supervised_sets_train_as_they_are_in_the_shared_cases() -> None:
    thought = "<think>\n\n</think>\n\n"
    assert [part for _, part in sft(FOLDER / "sft_messages.jsonl", qwen())] == [
        f"{thought}good<|im_end|>",
        f"b<|im_end|>|{thought}d<|im_end|>",
    ]
    assert [part for _, part in sft(FOLDER / "sft_messages.jsonl", qwen(), train_on="last")] == [
        f"{thought}good<|im_end|>",
        f"{thought}d<|im_end|>",
    ]
    assert [part for _, part in sft(FOLDER / "sft_completion.jsonl", llama())] == ["good<|eot|>"]


SHAREGPT = {"user": "human", "assistant": "gpt"}
CONVERSATION = [
    {"role": "system", "content": "s"},
    USER,
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CONVERSATION},
        {"messages": [*CONVERSATION, {"role": "user", "content": "no answer"}]},
        {"messages": CONVERSATION, "prompt": "unread"},
        {"conversations": [{"from": SHAREGPT.get(m["role"], m["role"]), "value": m["content"]} for m in CONVERSATION]},
        {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]},
        {"prompt": CONVERSATION[:2], "response": CONVERSATION[2:]},
    ],
)
@pytest.mark.parametrize("tokenizer", [llama(), byte_tokenizer(PLAIN_TEMPLATE), byte_tokenizer(None)])
def test_every_form_of_a_conversation_trains_on_the_same_turns(write: Write, tokenizer: Any, record: Any) -> None:
    end = {"<eos>": "<|eot|>"}.get(tokenizer.eos_token, "<|im_end|>")
    for train_on, parts in (("all", ["one", "two"]), ("last", ["two"])):
        ((whole, result),) = sft(write([record]), tokenizer, train_on=train_on)
        closes = tokenizer.chat_template is not None and tokenizer.eos_token == "<eos>"
        assert result == "|".join([*(part + end * closes for part in parts[:-1]), parts[-1] + end])
        rendered = PromptTemplate(tokenizer)
        # A plain prompt is continued without a separator, as in generation.
        plain = "s\n\nhi" + ("one\n\nand?two" if train_on == "all" else "\n\none\n\nand?two")
        text = rendered.apply(CONVERSATION).rstrip("\n") if rendered.is_chat else plain
        assert whole == text + ("" if text.endswith(end) else end)


def test_a_conversations_tokens_equal_its_incremental_tokenization(write: Write) -> None:
    tokenizer = qwen()
    template = PromptTemplate(tokenizer)
    source = load(write([{"messages": CONVERSATION}]), tokenizer, responses=True)
    assert source.prompt(0).tolist() == template.encode(CONVERSATION[:2])
    ids, mask = source.response(0)  # type: ignore[misc]
    before_last = int(mask.long().diff().eq(1).nonzero()[-1]) + 1
    assert [*source.prompt(0).tolist(), *ids[:before_last].tolist()] == template.encode(CONVERSATION[:4])


def test_rows_train_on_the_turns_of_the_assistant_alone(write: Write) -> None:
    from braidrl.algorithms.ragged import join_response

    path = write([{"messages": CONVERSATION}, {"prompt": "a", "response": "b"}])
    rows = as_rows(PromptLoader([load(path, llama(), responses=True)], shuffle=False).peek(range(2)), 1)
    tokens, mask, _, length, actions = join_response(rows["prompt"], rows["response"], rows["response_mask"])
    assert llama().decode(tokens[0][mask[0]]) == "one<|eot|>two<|eot|>" and actions.tolist() == [8, 2]
    assert length.tolist() == tokens.lengths.tolist() and llama().decode(tokens[1][mask[1]]) == "b<|eot|>"


def test_a_template_that_drops_earlier_reasoning_is_named_for_all_turns(write: Write) -> None:
    calls = {"role": "assistant", "content": "<think>\nr\n</think>\n\nx", "tool_calls": [{"function": CALL}]}
    answer = {"role": "assistant", "content": "y"}
    path = write([{"messages": [USER, calls, {"role": "tool", "content": "1"}, answer, USER, answer]}])
    with pytest.raises(UserError, match=r"line 1: .*template .*write train_on: last"):
        sft(path, qwen())
    assert sft(path, qwen(), train_on="last")[0][1] == "<think>\n\n</think>\n\ny<|im_end|>"


def test_reasoning_that_a_template_leaves_out_of_histories_is_trained_in_the_last_turn(write: Write) -> None:
    tokenizer = byte_tokenizer(STYLES["thinking"][0])
    answer = {"role": "assistant", "content": "<think>\nr\n</think>\n\ny"}
    ((whole, part),) = sft(write([{"messages": [USER, answer]}]), tokenizer)
    assert part == "r\n</think>\n\ny<|im_end|>"
    assert whole == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n{part}"
    several = write([{"messages": [USER, answer, USER, answer]}])
    with pytest.raises(UserError, match="write train_on: last"):
        sft(several, tokenizer)
    assert sft(several, tokenizer, train_on="last")[0][1] == part


def test_conversations_without_an_answer_are_named(write: Write) -> None:
    for messages in ([USER], [CONVERSATION[2]], [USER, {"role": "user", "content": "x"}]):
        with pytest.raises(UserError, match="line 1: "):
            sft(write([{"messages": messages}]), qwen())


GOOD, BAD = ({"role": "assistant", "content": content} for content in ("good", "bad"))


@needs_cases
def test_preference_sets_train_as_they_are_in_the_shared_cases() -> None:
    for which, word in (("response", "good"), ("rejected", "bad")):
        texts = trained(FOLDER / "dpo_pairs.jsonl", llama(), which, responses=False)
        assert [part for _, part in texts] == [f"{word}<|eot|>"] * 2 and len({whole for whole, _ in texts}) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}],
            "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "bad"}],
            "score_chosen": 1.0,
        },
    ],
)
def test_every_form_of_a_pair_gives_the_same_rows(write: Write, record: Any) -> None:
    opened = "<bos><|start|>user<|end|>\n\nhi<|eot|><|start|>assistant<|end|>\n\n"
    for which, word in (("response", "good"), ("rejected", "bad")):
        assert trained(write([record]), llama(), which, responses=False) == [
            (f"{opened}{word}<|eot|>", f"{word}<|eot|>")
        ]


def test_texts_without_a_prompt_share_their_beginning(write: Write) -> None:
    path = write([{"chosen": "The sky is blue.", "rejected": "The sky is blown up."}])
    (example,) = list(Reading(SourceConfig(path=path), pairs=True))
    assert (example.prompt, example.response, example.rejected) == ("The sky is", " blue.", " blown up.")
    with pytest.raises(UserError, match="line 1: no field 'prompt'"):
        list(Reading(SourceConfig(path=write([{"chosen": "a b", "rejected": "a c", "question": "?"}])), pairs=True))


def test_pairs_that_cannot_be_compared_are_left_out_with_their_reason(write: Write) -> None:
    answer = {"role": "assistant", "content": "x"}
    other = {"role": "user", "content": "other"}
    records = [
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        {"chosen": [USER, answer], "rejected": [other, answer]},
        {"prompt": "a", "chosen": "x", "rejected": "y"},
    ]
    reading = Reading(SourceConfig(path=write(records)), pairs=True)
    assert len(list(reading)) == 1
    assert dict(reading.left_out) == {
        "both responses are the same": 1,
        "the two conversations differ before an assistant's turn": 1,
    }

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from braidrl.config import SourceConfig
from braidrl.data.sources import Example, Reading
from braidrl.errors import UserError

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "question": "1+1", "answer": "It is 2. #### 2"},
}


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def fault(source: SourceConfig, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(Reading(source, **kwargs))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_plain_fields_become_an_example_and_the_others_its_metadata(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"prompt": "1+1=", "answer": "2", "level": 3, "tags": ["a", {"b": None}]}])
    assert list(Reading(SourceConfig(path=path))) == [
        Example("1+1=", "2", None, {"level": 3, "tags": ["a", {"b": None}]}, 1)
    ]


def test_verl_gsm8k_parquet_is_read_unchanged(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", [VERL_ROW, VERL_ROW])
    first, second = list(Reading(SourceConfig(path=path)))
    assert first.prompt == VERL_ROW["prompt"]
    assert first.answer == "2"
    assert first.metadata == {name: value for name, value in VERL_ROW.items() if name != "prompt"}
    assert (first.line, second.line) == (1, 2)


def test_dots_enter_nested_fields_and_a_field_named_with_a_dot_wins(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"a": {"b": {"q": "nested"}}, "c.d": "flat", "c": {"d": "hidden"}}])
    source = SourceConfig(path=path, prompt_field="a.b.q", answer_field="c.d")
    assert [(e.prompt, e.answer) for e in list(Reading(source))] == [("nested", "flat")]


def test_numbers_as_answers_become_text(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"prompt": "a", "answer": answer} for answer in (7, 0.5, "x", True, ["x", "y"], None)])
    assert [e.answer for e in list(Reading(SourceConfig(path=path)))] == ["7", "0.5", "x", True, ["x", "y"], None]


def test_responses_are_read_only_where_asked_for(write_jsonl: Callable[..., Path]) -> None:
    source = SourceConfig(path=write_jsonl([{"prompt": "a", "response": "b"}]))
    assert list(Reading(source)) == [Example("a", None, None, {"response": "b"}, 1)]
    assert list(Reading(source, responses=True)) == [Example("a", None, "b", {}, 1)]


def test_one_field_may_be_answer_and_response(write_jsonl: Callable[..., Path]) -> None:
    source = SourceConfig(path=write_jsonl([{"prompt": "a", "answer": "b"}]), response_field="answer")
    assert list(Reading(source, responses=True)) == [Example("a", "b", "b", {}, 1)]


def test_empty_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert [(e.prompt, e.line) for e in list(Reading(SourceConfig(path=path)))] == [("a", 1), ("b", 4)]


@pytest.mark.parametrize(
    ("second_line", "expected"),
    [
        ('{"prompt": ', "is not JSON: .*character 11"),
        ('{"prompt": "a", "x": NaN}', "is not JSON: NaN .*write null"),
        ("[1]", "holds a list; write a JSON object"),
        ("null", "holds null; write a JSON object"),
    ],
)
def test_a_line_that_is_not_a_json_object_is_named(tmp_path: Path, second_line: str, expected: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n' + second_line + "\n")
    assert re.match(rf"{path}, line 2 {expected}", fault(SourceConfig(path=path)))


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert re.match(f"{path}, line 2 is not UTF-8; save", fault(SourceConfig(path=path)))


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"prompts": "a"}, "no field 'prompt' .*'prompts'.*Set prompt_field"),
        ({"text": "a", "prompt": None}, "the field 'prompt' .*null.*set prompt_field"),
        ({"prompt": 3}, "'prompt' is a number; write text"),
        ({"prompt": ""}, "'prompt' is empty; write text"),
        ({"prompt": []}, "'prompt' is empty; write text"),
        ({"prompt": ["a"]}, "message 1 of 'prompt' is text; write"),
        (
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}
                ]
            },
            "a user's message has an image.*`braid check` .*`convert`",
        ),
        ({"prompt": [{"role": "user"}]}, "'content' of message 1 .*missing; write text"),
        ({"prompt": [{"role": "user", "content": []}]}, "'content' of message 1 .*list; write text"),
    ],
)
def test_a_prompt_that_is_missing_or_of_a_wrong_type_is_named(
    write_jsonl: Callable[..., Path], second: Any, expected: str
) -> None:
    path = write_jsonl([{"prompt": "a"}, second])
    assert re.match(rf"{path}, line 2: {expected}", fault(SourceConfig(path=path)))


def test_a_nested_field_is_suggested_with_its_dots(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"extra_info": {"question": "a"}}])
    message = fault(SourceConfig(path=path, prompt_field="extra_info.qestion"))
    assert "Did you mean 'extra_info.question'?" in message


def test_a_configured_answer_field_that_is_missing_is_an_error(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"prompt": "a", "solution": "1"}, {"prompt": "b"}])
    message = fault(SourceConfig(path=path, answer_field="solution"))
    assert re.match(rf"{path}, line 2: no field 'solution' .*Set answer_field", message)


def test_a_missing_or_wrong_response_is_an_error_where_asked_for(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"prompt": "a", "reponse": "x"}])
    message = fault(SourceConfig(path=path), responses=True)
    assert re.match(rf"{path}, line 1: no field 'response' .*'reponse'.*Set response_field", message)
    path = write_jsonl([{"prompt": "a", "response": ["x"]}])
    message = fault(SourceConfig(path=path), responses=True)
    assert re.match(rf"{path}, line 1: 'response' is a list; write .*text", message)


def test_parquet_faults_name_the_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "a"}] * 1500 + [{"prompt": None}])
    assert re.match(rf"{path}, row 1501: .*'prompt' .*null", fault(SourceConfig(path=path)))


def test_parquet_columns_without_a_json_form_become_text_or_are_dropped(tmp_path: Path) -> None:
    about = {"day": datetime.date(2024, 1, 2), "price": Decimal("1.50"), "inner": [float("nan")], "deep": {"raw": b"x"}}
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "a", "image": b"x", **about}])
    reading = Reading(SourceConfig(path=path))
    (example,) = reading
    assert example.metadata == {"day": "2024-01-02", "price": "1.50", "inner": [None], "deep": {}}
    assert reading.without_form == ["image"]


def test_files_that_are_empty_missing_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    empty, other, broken = tmp_path / "empty.jsonl", tmp_path / "data.csv", tmp_path / "broken.parquet"
    for path in (empty, other, broken):
        path.write_text("\n")
    assert re.match(rf"{empty} has no examples; write", fault(SourceConfig(path=empty)))
    assert re.match(rf"{other}: .*'.csv' .*give a .jsonl, .json or .parquet file", fault(SourceConfig(path=other)))
    absent = tmp_path / "absent.jsonl"
    assert re.match(rf"no data file {absent}; give .*.jsonl, .json or .parquet", fault(SourceConfig(path=absent)))
    assert fault(SourceConfig(path=broken)).startswith(f"{broken} is not a readable parquet")
    rowless = tmp_path / "rowless.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), rowless)
    assert "has no examples" in fault(SourceConfig(path=rowless))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the shared GSM8K files are not beside this checkout")
def test_all_of_gsm8k_is_read() -> None:
    for name, count in (("train", 7473), ("test", 1319)):
        path = GSM8K / f"{name}.jsonl"
        examples = list(Reading(SourceConfig(path=path, prompt_field="question")))
        assert len(examples) == count
        with path.open() as file:
            first = json.loads(file.readline())
        assert (examples[0].prompt, examples[0].answer) == (first["question"], first["answer"])
        assert all("####" in e.answer for e in examples)


def test_verifiers_find_fields_under_the_names_that_the_data_have(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl([{"question": "1+1=", "solution": {"final": "2"}, "level": 3}])
    source = SourceConfig(path=path, prompt_field="question", answer_field="solution.final")
    (example,) = list(Reading(source))
    assert example.metadata == {"question": "1+1=", "solution": {"final": "2"}, "level": 3}

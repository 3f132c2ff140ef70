"""Selection of a source's records: files of each kind, folders, fields with values, and numbered parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.prompts import load_eval, load_train
from braidrl.data.sources import Reading
from braidrl.errors import UserError

Write = Callable[..., Path]


def prompts(source: SourceConfig, **options: Any) -> list[Any]:
    return [example.prompt for example in Reading(source, **options)]


def test_a_json_file_holds_a_list_or_lines(tmp_path: Path) -> None:
    one, other = tmp_path / "list.json", tmp_path / "lines.json"
    one.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1))
    other.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert prompts(SourceConfig(path=one)) == prompts(SourceConfig(path=other)) == ["a", "b"]
    one.write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(UserError, match=r"list.json, row 2 .*; write.*JSON object"):
        prompts(SourceConfig(path=one))
    one.write_text('[{"prompt": NaN}]')
    with pytest.raises(UserError, match=r"list.json .*NaN .*; write null"):
        prompts(SourceConfig(path=one))


def test_a_folder_is_read_by_its_splits_as_datasets_finds_them(tmp_path: Path) -> None:
    for split, rows in {"train": ["a", "b"], "test": ["c"]}.items():
        table = pyarrow.Table.from_pylist([{"prompt": text, "answer": "1"} for text in rows])
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    folder = SourceConfig(path=tmp_path)
    assert prompts(folder) == ["a", "b"] and prompts(folder, usual_split="test") == ["c"]
    assert prompts(folder.model_copy(update={"split": "test"})) == ["c"]
    with pytest.raises(UserError, match=r"split 'tets'.* mean 'test'\? Set `split`"):
        prompts(folder.model_copy(update={"split": "tets"}))
    with pytest.raises(UserError, match=r"datasets: .*'main' not found"):
        prompts(folder.model_copy(update={"subset": "main"}))
    alone = SourceConfig(path=tmp_path / "test-00000-of-00001.parquet", split="test")
    with pytest.raises(UserError, match=r"one file, .*splits; remove"):
        prompts(alone)


def test_records_are_chosen_by_the_values_of_fields(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": str(i), "about": {"level": i % 3}, "kind": "x" if i else "y"} for i in range(6)])
    reading = Reading(SourceConfig(path=path, where={"about.level": [0, 1], "kind": "x"}))
    assert [example.prompt for example in reading] == ["1", "3", "4"]
    assert dict(reading.left_out) == {
        "kind is another than `where` says": 1,
        "about.level is another than `where` says": 2,
    }
    with pytest.raises(UserError, match=r"no examples \(6 .*kind .*`where`"):
        prompts(SourceConfig(path=path, where={"kind": "z"}))


def test_unique_skips_repeated_prompts(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": text} for text in "abacab"])
    reading = Reading(SourceConfig(path=path, unique=True))
    assert [example.prompt for example in reading] == ["a", "b", "c"]
    assert dict(reading.left_out) == {"the prompt was there before": 3}
    assert prompts(SourceConfig(path=path)) == list("abacab")


def test_a_part_is_taken_by_number(write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": str(i)} for i in range(6)])
    assert prompts(SourceConfig(path=path, skip=2, first=3)) == ["2", "3", "4"]
    with pytest.raises(UserError, match=r"no examples \(.*first 9 .*skipped\)"):
        prompts(SourceConfig(path=path, skip=9))


def test_held_out_examples_are_evaluated_and_not_trained(write_jsonl: Write, chat_tokenizer: Any) -> None:
    source = SourceConfig(path=write_jsonl([{"prompt": str(i)} for i in range(6)]), skip=1)
    data = DataConfig(train=[source], held_out=2)
    (train,), held_out = load_train(data, chat_tokenizer), load_eval(data, chat_tokenizer)
    assert [example.prompt for example in train] == ["3", "4", "5"]
    assert {name: [e.prompt for e in result] for name, result in held_out.items()} == {"held_out": ["1", "2"]}
    again = DataConfig.model_validate(data.model_dump(mode="json"))
    assert again.evaluation_sources == data.evaluation_sources, "a run's configuration can be read again"
    with pytest.raises(ValueError, match=r"data.eval .*held_out already"):
        DataConfig(train=[source], held_out=2, eval={"held_out": source})
    with pytest.raises(ValueError, match=r"held_out leaves .*`first` takes"):
        DataConfig(train=[source.model_copy(update={"first": 2})], held_out=2)
    assert len(list(Reading(source))) == 5

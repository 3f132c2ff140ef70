"""Sources larger than memory give the same examples in the same order as from memory; they are read once and cached."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import LARGE, PromptLoader, as_rows, shuffled
from braidrl.data.prompts import LoadedSource, load_eval, load_train
from braidrl.data.rows import Rows
from braidrl.data.tables import shown, with_progress
from braidrl.errors import UserError

Write = Callable[..., Path]
RECORDS = [{"prompt": "x" * (i % 7 + 1), "answer": i, "response": str(i), "level": i} for i in range(1300)]


def config(path: Path, cache: Path, **settings: Any) -> DataConfig:
    """Return a source that is kept in a cache."""
    return DataConfig(
        train=[SourceConfig(path=path)],
        max_prompt_tokens=5,
        chat_template=False,
        in_memory=100,
        cache=cache,
        **settings,
    )


def tables(cache: Path) -> list[Path]:
    return list(cache.rglob("*.arrow")) if cache.exists() else []


def rows_of(source: LoadedSource) -> Rows:
    return as_rows(PromptLoader([source], seed=3).peek(range(2000)), 2)


def test_a_kept_table_gives_the_same_rows_as_one_of_a_run(
    write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path
) -> None:
    kept = config(write_jsonl(RECORDS), tmp_path / "cache")
    passing = kept.model_copy(update={"in_memory": 10_000})
    (first,) = load_train(passing, plain_tokenizer, responses=True)
    assert not tables(tmp_path / "cache")
    (second,) = load_train(kept, plain_tokenizer, responses=True)
    assert len(tables(tmp_path / "cache")) == 1
    assert (second.facts, len(second), second.dropped) == (first.facts, 930, 370) and second.facts.read == 1300
    one, other = rows_of(first), rows_of(second)
    assert dict(one.items()).keys() == dict(other.items()).keys() and list(one["metadata"]) == list(other["metadata"])
    for name in ("group", "prompt_length"):
        assert one[name].equal(other[name])
    for name in ("prompt", "response", "response_mask"):
        assert one[name].values.equal(other[name].values) and one[name].offsets.equal(other[name].offsets)


def test_a_temporary_table_is_removed_after_the_run(write_jsonl: Write, plain_tokenizer: Any) -> None:
    (source,) = load_train(DataConfig(train=[SourceConfig(path=write_jsonl(RECORDS))]), plain_tokenizer)
    folder = Path(source.kept)
    assert tables(folder)
    del source
    gc.collect()
    assert not folder.exists()


def load_in_child(path: Path, tokenizer: Any, kept: Any) -> None:
    """Load a source in a process started by multiprocessing, and return the path of its table."""
    (source,) = load_train(DataConfig(train=[SourceConfig(path=path)]), tokenizer)
    kept.send(source.kept)
    if kept.recv() == "die":
        os._exit(1)


def test_tables_of_processes_that_end_or_are_killed_are_removed(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path, forked = write_jsonl(RECORDS[:3]), multiprocessing.get_context("fork")
    for word in ("end", "die"):
        mine, theirs = forked.Pipe()
        child = forked.Process(target=load_in_child, args=(path, plain_tokenizer, theirs))
        child.start()
        folder = Path(mine.recv())
        assert tables(folder)
        mine.send(word)
        child.join()
        assert folder.exists() is (word == "die")
    load_train(DataConfig(train=[SourceConfig(path=path)]), plain_tokenizer)
    assert not folder.exists()


def test_pairs_and_the_first_example_without_an_answer_are_known(write_jsonl: Write, plain_tokenizer: Any) -> None:
    records = [{"prompt": str(i), "chosen": "good", "rejected": "b" * (i % 9)} for i in range(200)]
    records[0]["answer"] = "3"
    data = DataConfig(train=[SourceConfig(path=write_jsonl(records))])
    (source,) = load_train(data, plain_tokenizer, pairs=True)
    assert (source.facts.unanswered, source.facts.unanswered_fields) == (2, [])
    assert source.facts.longest_row == 3 + 8 + 1
    assert set(rows_of(source)["response"].lengths[::2].tolist()) == {5}


def test_a_table_is_rewritten_only_when_its_file_or_settings_change(
    write_jsonl: Write, plain_tokenizer: Any, chat_tokenizer: Any, tmp_path: Path
) -> None:
    path, cache = write_jsonl(RECORDS), tmp_path / "cache"
    data = config(path, cache)
    load_train(data, plain_tokenizer)
    (first,) = tables(cache)
    written = first.stat().st_mtime_ns
    load_train(data, plain_tokenizer)
    assert [file.stat().st_mtime_ns for file in tables(cache)] == [written]
    load_train(data.model_copy(update={"chat_template": True, "max_prompt_tokens": 90}), chat_tokenizer)
    load_train(data, plain_tokenizer, responses=True)
    assert len(tables(cache)) == 3
    os.utime(path, ns=(1, 1))
    load_train(data, plain_tokenizer)
    load_train(data.model_copy(update={"template": {"x": 1}}), plain_tokenizer)
    assert len(tables(cache)) == 5


def test_another_process_maps_the_table_that_one_has_written(
    write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path
) -> None:
    path = write_jsonl(RECORDS)
    data = DataConfig(eval={"set": SourceConfig(path=path)})
    mine = load_eval(data, plain_tokenizer)["set"]
    with path.open("a") as file:
        file.write("no JSON: a second reading would fail")
    theirs = load_eval(data, plain_tokenizer, kept={"set": mine.kept})["set"]
    assert theirs.prompt(5).equal(mine.prompt(5)) and len(theirs) == len(mine)
    with pytest.raises(UserError, match="line 1301 is not JSON"):
        load_eval(data, plain_tokenizer, kept={"set": str(tmp_path / "elsewhere")})


def test_a_fault_leaves_no_table(write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path) -> None:
    broken = config(write_jsonl([*RECORDS, {"prompt": 3}]), tmp_path / "cache")
    with pytest.raises(UserError, match=r"line 1301: 'prompt' .*; write text"):
        load_train(broken, plain_tokenizer)
    short = config(write_jsonl(RECORDS), tmp_path / "cache").model_copy(update={"max_prompt_tokens": 0})
    with pytest.raises(UserError, match=r"1300 prompts .*data.max_prompt_tokens=0; .*shortest has 1"):
        load_train(short, plain_tokenizer)
    assert not tables(tmp_path / "cache")


def test_a_bar_appears_only_when_tokenising_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    batches: list[list[Any]] = [[None, None], [None]]
    assert list(with_progress(batches, "Tokenising")) == batches
    assert capsys.readouterr().err == ""
    shown = []
    for batch in with_progress(batches, "Tokenising", after_s=0.01):
        shown.append(batch)
        time.sleep(0.02)
    assert shown == batches
    captured = capsys.readouterr()
    assert "Tokenising" in captured.err and captured.out == ""


def test_a_line_appears_before_a_slow_first_batch_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("Reading sums", total=3, after_s=0.01):
        time.sleep(0.1)
        assert capsys.readouterr().err == "Reading sums ...\n"


@settings(max_examples=20, deadline=None)
@given(st.integers(LARGE + 1, LARGE * 40), st.integers(0, 3), st.data())
def test_a_large_order_visits_no_example_twice(size: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 2000))
    result = [shuffled(0, 0, epoch, size, place) for place in range(start, start + 2000)]
    assert len(set(result)) == 2000 and all(0 <= index < size for index in result)
    assert result != [shuffled(0, 0, epoch + 1, size, place) for place in range(start, start + 2000)]


def test_a_large_order_is_a_permutation_without_visible_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidrl.data.loader.LARGE", 10)
    for size in (11, 100, 1024, 1025, 5000):
        assert sorted(shuffled(1, 0, 0, size, place) for place in range(size)) == list(range(size))
    order = [shuffled(1, 0, 0, 5000, place) for place in range(5000)]
    rising = sum(a < b for a, b in pairwise(order))
    assert 2300 < rising < 2700

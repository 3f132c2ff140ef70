"""Sources larger than memory: the same examples in the same order as from memory, read once, found again, and refused alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import LARGE, PromptLoader, as_rows, shuffled
from braidrl.data.prompts import LoadedSource, Readers, load_eval, load_train
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from tests.data.readers import read_together

Write = Callable[..., Path]
RECORDS = [{"prompt": "x" * (i % 7 + 1), "answer": i, "response": str(i), "level": i} for i in range(1300)]


def both(path: Path, tokenizer: Any, cache: Path, **options: Any) -> list[LoadedSource]:
    """A source held in memory, and the same one from an index."""
    memory = DataConfig(train=[SourceConfig(path=path)], max_prompt_tokens=5, chat_template=False, cache=cache)
    indexed = memory.model_copy(update={"in_memory": 100})
    return [load_train(data, tokenizer, **options)[0] for data in (memory, indexed)]


def rows_of(source: LoadedSource) -> Rows:
    return as_rows(PromptLoader([source], seed=3).take(2000), 2)


def test_an_index_gives_the_same_rows_as_memory(write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(RECORDS)
    memory, indexed = both(path, plain_tokenizer, tmp_path / "cache", responses=True)
    assert isinstance(indexed.kept, str) and len(list((tmp_path / "cache").iterdir())) == 1
    assert (
        (indexed.read, indexed.dropped, len(indexed)) == (memory.read, memory.dropped, len(memory)) == (1300, 370, 930)
    )
    one, other = rows_of(memory), rows_of(indexed)
    assert dict(one.items()).keys() == dict(other.items()).keys() and list(one["metadata"]) == list(other["metadata"])
    for name in ("group", "prompt_length"):
        assert one[name].equal(other[name])
    for name in ("prompt", "response"):
        assert one[name].values.equal(other[name].values) and one[name].offsets.equal(other[name].offsets)
    assert (indexed.longest_prompt, indexed.longest_row) == (
        memory.longest_prompt,
        memory.longest_row,
    ) and indexed.report() == memory.report()


def test_pairs_and_examples_without_an_answer_are_known_of_an_index(
    write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path
) -> None:
    records = [{"prompt": str(i), "chosen": "good", "rejected": "b" * (i % 9)} for i in range(200)]
    records[3]["answer"] = "3"
    memory, indexed = both(write_jsonl(records), plain_tokenizer, tmp_path / "cache", pairs=True)
    assert memory.unanswered == indexed.unanswered and indexed.unanswered and indexed.unanswered.line == 1
    assert indexed.longest_row == memory.longest_row
    assert list(rows_of(memory)["response"].values) == list(rows_of(indexed)["response"].values)


def test_an_index_is_written_once_and_again_when_the_file_or_a_setting_is_another(
    write_jsonl: Write, plain_tokenizer: Any, chat_tokenizer: Any, tmp_path: Path
) -> None:
    path, cache = write_jsonl(RECORDS), tmp_path / "cache"
    both(path, plain_tokenizer, cache)
    (first,) = cache.iterdir()
    written = first.stat().st_mtime_ns
    both(path, plain_tokenizer, cache)
    assert [folder.stat().st_mtime_ns for folder in cache.iterdir()] == [written]
    both(path, chat_tokenizer, cache)
    both(path, plain_tokenizer, cache, responses=True)
    assert len(list(cache.iterdir())) == 3
    os.utime(path, ns=(1, 1))
    both(path, plain_tokenizer, cache)
    assert len(list(cache.iterdir())) == 4


def test_another_process_opens_the_index_that_one_has_written(
    write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path
) -> None:
    path = write_jsonl(RECORDS)
    data = DataConfig(eval={"set": SourceConfig(path=path)}, in_memory=10, cache=tmp_path / "cache")
    mine = load_eval(data, plain_tokenizer)["set"]
    path.unlink()
    theirs = load_eval(data, plain_tokenizer, kept={"set": str(mine.kept)})["set"]
    assert theirs.prompt(5).equal(mine.prompt(5)) and len(theirs) == len(mine)
    with pytest.raises(
        UserError, match=r"there is no index .*elsewhere; data.cache must be a folder that all machines"
    ):
        load_eval(data, plain_tokenizer, kept={"set": str(tmp_path / "elsewhere")})


def test_readers_share_the_index_that_the_first_of_them_writes(
    write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path
) -> None:
    data = DataConfig(train=[SourceConfig(path=write_jsonl(RECORDS))], in_memory=10, cache=tmp_path / "cache")
    sources = read_together(3, lambda own: load_train(data, plain_tokenizer, readers=own)[0])
    (index,) = (tmp_path / "cache").iterdir()
    assert [source.kept for source in sources] == [str(index)] * 3 and sources[2].prompt(7).equal(sources[0].prompt(7))
    broken = data.model_copy(update={"train": [SourceConfig(path=write_jsonl([*RECORDS, {"prompt": 3}]))]})

    def refused(own: Readers) -> Any:
        with pytest.raises(UserError, match="line 1301: 'prompt' is a number; write text"):
            load_train(broken, plain_tokenizer, readers=own)

    read_together(3, refused)


def test_a_fault_leaves_no_index(write_jsonl: Write, plain_tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl([*RECORDS, {"prompt": 3}])
    with pytest.raises(UserError, match="line 1301: 'prompt' is a number; write text"):
        both(path, plain_tokenizer, tmp_path / "cache")[1]
    data = DataConfig(train=[SourceConfig(path=write_jsonl(RECORDS))], in_memory=10, cache=tmp_path / "cache")
    short = data.model_copy(update={"max_prompt_tokens": 0})
    with pytest.raises(
        UserError, match=r"all 1300 prompts are longer than data.max_prompt_tokens=0; the shortest has 1"
    ):
        load_train(short, plain_tokenizer)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@settings(max_examples=20, deadline=None)
@given(st.integers(LARGE + 1, LARGE * 40), st.integers(0, 3), st.data())
def test_a_large_order_visits_no_example_twice(size: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 2000))
    found = [shuffled(0, 0, epoch, size, place) for place in range(start, start + 2000)]
    assert len(set(found)) == 2000 and all(0 <= index < size for index in found)
    assert found != [shuffled(0, 0, epoch + 1, size, place) for place in range(start, start + 2000)]


def test_a_large_order_is_a_permutation_without_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidrl.data.loader.LARGE", 10)
    for size in (11, 100, 1024, 1025, 5000):
        assert sorted(shuffled(1, 0, 0, size, place) for place in range(size)) == list(range(size))
    order = [shuffled(1, 0, 0, 5000, place) for place in range(5000)]
    rising = sum(a < b for a, b in pairwise(order))
    assert 2300 < rising < 2700

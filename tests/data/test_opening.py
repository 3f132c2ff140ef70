"""Opened sources: a run draws from a file that is still being tokenised, as from one that was read before."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import braidrl.data.opening
from braidrl.config import DataConfig, SourceConfig, load_config
from braidrl.data import lines
from braidrl.data.lines import Lines, index_lines
from braidrl.data.loader import PromptLoader
from braidrl.data.prompts import LoadedSource, load_train
from braidrl.data.records import written_lines
from braidrl.data.tables import OwnBatches
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError
from braidrl.runtimes.run import TrainingRun
from tests.tiny import settings, write_model

Write = Callable[..., Path]
LIMIT = 60
COMPARED = ("actor/entropy", "response/length_mean", "tokens/generated")
RECORDS: list[dict[str, Any]] = [
    # Long prompts, which are dropped, and long lines of short prompts.
    {"prompt": f"prompt {n}" + "." * (n % 40 if n % 11 else 60), "answer": n, "about": "x" * (n % 7 * 10)}
    for n in range(400)
]


@pytest.fixture(autouse=True)
def _opens_short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(braidrl.data.opening, "LEAST_LINES", 100)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the threads that write tables until the event is set."""
    event, batches = threading.Event(), OwnBatches.__iter__

    def waiting(share: OwnBatches) -> Any:
        if threading.current_thread().name == "reading":
            event.wait(60)
        return batches(share)

    monkeypatch.setattr(OwnBatches, "__iter__", waiting)
    return event


def drawn(source: LoadedSource) -> list[Any]:
    return [(one.index, one.example, one.prompt.tolist()) for one in PromptLoader([source], seed=3).peek(range(500))]


def data_of(path: Path, **others: Any) -> DataConfig:
    return DataConfig(train=[SourceConfig(path=path)], max_prompt_tokens=LIMIT, **others)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_the_index_has_the_lines_that_a_reader_yields(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "READ_BYTES", block)
    drawing, path, index = random.Random(block), tmp_path / "lines", tmp_path / "index"
    for _ in range(200):
        pieces = [b"{}", b"ab", b" ", b"\t", b"\n", b"\r\n", b"\n\n"]
        text = b"".join(drawing.choices(pieces, k=drawing.randrange(14)))
        path.write_bytes(text if drawing.random() < 0.8 else b"\xef\xbb\xbf" + text)
        index_lines(path, index)
        result = Lines(path, index)
        with path.open("rb") as file:
            assert list(result.at(range(len(result)))) == list(written_lines(file)), text


def test_rows_and_their_order_are_the_same_before_and_after_the_whole_file_is_read(
    write_jsonl: Write, plain_tokenizer: Any, held: threading.Event
) -> None:
    data = data_of(write_jsonl(RECORDS))
    (whole,) = load_train(data, plain_tokenizer)
    (source,) = load_train(data, plain_tokenizer, opens=True)
    assert source.opening is not None and 0 < whole.dropped == source.dropped
    before = drawn(source)
    assert not source.settle() and source.opening is not None, "its table is not written yet"
    held.set()
    assert source.settle(wait=True) and source.opening is None
    assert before == drawn(source) == drawn(whole) and source.facts == whole.facts


def test_each_line_is_tokenised_once_for_the_table(
    write_jsonl: Write, plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before, encode = list[str](), list[str](), PromptTemplate.encode_texts

    def counted(template: PromptTemplate, texts: list[str], *given: Any, **named: Any) -> Any:
        (made if threading.current_thread().name == "reading" else before).extend(texts)
        return encode(template, texts, *given, **named)

    monkeypatch.setattr(PromptTemplate, "encode_texts", counted)
    (source,) = load_train(data_of(write_jsonl(RECORDS)), plain_tokenizer, opens=True)
    assert source.settle(wait=True) and sorted(made) == sorted(record["prompt"] for record in RECORDS)
    # Before the table is whole only lines that may be too long are tokenised.
    before = [text for text in before if text.startswith("prompt")]
    assert 0 < len(before) == len(set(before)) < len(RECORDS)


def test_a_fault_anywhere_in_an_opened_file_is_raised_with_its_line(write_jsonl: Write, plain_tokenizer: Any) -> None:
    path = write_jsonl([*RECORDS, {"prompt": 3}])
    (source,) = load_train(data_of(path), plain_tokenizer, opens=True)
    with pytest.raises(UserError, match=r"line 401: 'prompt' .*; write text"):
        source.settle(wait=True)
    assert not Path(source.kept).exists()
    # A doubtful line is read first.
    path = write_jsonl([*RECORDS, {"prompt": 3, "about": "x" * LIMIT}])
    with pytest.raises(UserError, match=r"line 401: 'prompt' .*; write text"):
        load_train(data_of(path), plain_tokenizer, opens=True)


def test_files_with_too_many_doubtful_lines_are_read_before(
    write_jsonl: Write, plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(braidrl.data.opening, "MOST_DOUBTFUL", 20)
    (source,) = load_train(data_of(write_jsonl(RECORDS)), plain_tokenizer, opens=True)
    assert source.opening is None


def test_a_prompt_longer_than_its_line_allows_is_named(
    write_jsonl: Write, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrice = "{% for m in messages %}{{ m.content }}{{ m.content }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(chat_tokenizer, "chat_template", thrice)
    path = write_jsonl([{"prompt": "short"}] * 150 + [{"prompt": "x" * 40}])
    (source,) = load_train(data_of(path), chat_tokenizer, opens=True)
    with pytest.raises(UserError, match=f"line 151: .*data.max_prompt_tokens={LIMIT}"):
        source.prompt(150)
    with pytest.raises(UserError, match=r"1 of its prompts .* data"):
        source.settle(wait=True)


def test_a_run_is_the_same_while_its_data_is_read_and_a_fault_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: threading.Event
) -> None:
    model, data = write_model(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+7=", "answer": str(n + 7)}) + "\n" for n in range(150)))
    metrics = []
    for least in (100, 1000):
        monkeypatch.setattr(braidrl.data.opening, "LEAST_LINES", least)
        tree = settings(tmp_path / str(least), model, data, trainer={"steps": 1})
        (tmp_path / "run.yaml").write_text(json.dumps(tree))
        with TrainingRun(load_config(tmp_path / "run.yaml")) as run:
            assert (run.prepared.sources[0].opening is not None) is (least == 100)
            run.train()
            held.set()
        (line,) = (run.folder / "metrics.jsonl").read_text().splitlines()
        metrics.append({name: value for name, value in json.loads(line).items() if name in COMPARED})
    assert metrics[0] == metrics[1] and all(metrics[0].values())
    data.write_text(data.read_text() + '{"prompt": 5}\n')
    monkeypatch.setattr(braidrl.data.opening, "LEAST_LINES", 100)
    with TrainingRun(load_config(tmp_path / "run.yaml", ["name=ended"])) as run:
        run.prepared.sources[0].opening._thread.join()  # type: ignore[union-attr]
        with pytest.raises(UserError, match="line 151"):
            run.train()

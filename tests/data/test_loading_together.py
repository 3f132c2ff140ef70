"""Ranks tokenise a source together: each example once, with the tables that one process makes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from braidrl.cluster.world import World, world_at
from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import PromptLoader
from braidrl.data.prompts import load_train
from tests.data.conftest import byte_tokenizer

Write = Callable[..., Path]
RANKS = 3


def load_as_rank(rank: int, store: Path, folder: Path, data: str, answers: Any) -> None:
    """Load data as one of several ranks, with a folder of its own machine, and count the texts that are tokenised."""
    tempfile.tempdir = str(folder)
    tokenizer, texts = byte_tokenizer(None), list[str]()

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any, **settings: Any) -> Any:
            texts.extend([text] if isinstance(text, str) else text)
            return super().__call__(text, **settings)

    tokenizer.__class__ = Counting
    Counting.__module__ = "transformers.counting"
    world = World()
    try:
        world = world_at(dist.FileStore(str(store), RANKS), rank, RANKS, 60, False, "127.0.0.1")
        sources = load_train(DataConfig.model_validate_json(data), tokenizer, ranks=world)
        loader = PromptLoader(sources, seed=5)
        drawn = [(one.source, one.index, one.example.prompt, one.prompt.tolist()) for one in loader.peek(range(250))]
        counted = [text for text in texts if text.startswith("prompt")]
        answers.put(
            (rank, counted, [[*source] == [*source] and len(source) for source in sources], drawn, sources[0].report())
        )
    except Exception as error:
        answers.put((rank, [], [], [], f"{type(error).__name__}: {error}"))
    finally:
        world.close()


def load_by_ranks(tmp_path: Path, data: DataConfig, machines: int) -> list[Any]:
    """Load data on three ranks of one or two machines, and return each rank's answer."""
    forked = multiprocessing.get_context("fork")
    answers, store = forked.Queue(), tmp_path / "store"
    store.unlink(missing_ok=True)
    children = []
    for rank in range(RANKS):
        folder = tmp_path / f"machine{rank % machines}"
        folder.mkdir(exist_ok=True)
        arguments = (rank, store, folder, data.model_dump_json(), answers)
        children.append(forked.Process(target=load_as_rank, args=arguments))
        children[-1].start()
    result = sorted(answers.get(timeout=60) for _ in children)
    for child in children:
        child.join(60)
    return result


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("in_memory", [1000, 10])
def test_three_ranks_tokenise_each_example_once_and_draw_as_one_process(
    machines: int, in_memory: int, write_jsonl: Write, tmp_path: Path
) -> None:
    first = write_jsonl([{"prompt": f"prompt {number}" + "." * (number % 50)} for number in range(360)], "first.jsonl")
    other = write_jsonl(
        [{"prompt": f"prompt other {number}", "level": number % 3} for number in range(90)], "other.jsonl"
    )
    data = DataConfig(
        train=[SourceConfig(path=first, skip=10), SourceConfig(path=other, where={"level": [0, 1]}, weight=2.0)],
        max_prompt_tokens=50,
        in_memory=in_memory,
        cache=tmp_path / "cache",
    )
    alone = load_train(data.model_copy(update={"in_memory": 1000}), byte_tokenizer(None))
    expected = [
        (o.source, o.index, o.example.prompt, o.prompt.tolist()) for o in PromptLoader(alone, seed=5).peek(range(250))
    ]
    result = load_by_ranks(tmp_path, data, machines)
    counted = [texts for _, texts, *_ in result]
    assert sorted(text for texts in counted for text in texts) == sorted(
        [f"prompt {n}" + "." * (n % 50) for n in range(10, 360)] + [f"prompt other {n}" for n in range(90) if n % 3 < 2]
    )
    assert all(len(texts) >= 64 for texts in counted)
    for _, _, sizes, drawn, report in result:
        assert sizes == [len(source) for source in alone] and drawn == expected and report == alone[0].report()
    if in_memory == 10:
        # A kept table is read by runs with other ranks, and nothing is tokenised again.
        assert all(not texts for _, texts, *_ in load_by_ranks(tmp_path, data, machines))
        again = load_train(data, byte_tokenizer(None))
        assert [[*one] for one in again] == [[*one] for one in alone]


def test_the_first_invalid_example_of_the_file_is_named_by_all_ranks(write_jsonl: Write, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": f"prompt {number}"} for number in range(300)]
    for line in (150, 280):
        records[line] = {"prompt": [{"role": "user", "content": ""}]}
    path = write_jsonl(records)
    result = load_by_ranks(tmp_path, DataConfig(train=[SourceConfig(path=path)]), 1)
    says = f"UserError: {path}, line 151: the tokenizer makes no token of this prompt; write some text"
    assert [report for *_, report in result] == [says] * RANKS
    records[:] = [{"prompt": "prompt that is too long"}] * 200
    path = write_jsonl(records)
    result = load_by_ranks(tmp_path, DataConfig(train=[SourceConfig(path=path)], max_prompt_tokens=3), 1)
    assert all("data.max_prompt_tokens=3; the shortest has 23" in r for *_, r in result)

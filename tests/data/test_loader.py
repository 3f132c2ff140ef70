from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import Admitted, PromptLoader
from braidrl.data.prompts import LoadedSource, load_source
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

Make = Callable[..., LoadedSource]


@pytest.fixture(scope="session")
def make(plain_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes a source of the prompts "0", "1", ..."""
    folder = tmp_path_factory.mktemp("numbers")

    def source(size: int, weight: float = 1.0) -> LoadedSource:
        path = folder / f"{size}.jsonl"
        path.write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(size)))
        return load_source(
            Reading(SourceConfig(path=path, weight=weight)),
            DataConfig(max_prompt_tokens=9),
            PromptTemplate(plain_tokenizer),
        )

    return source


@pytest.fixture(scope="session")
def sources(make: Make) -> list[LoadedSource]:
    return [make(7), make(13, 2.0), make(3, 0.5)]


def what(admitted: list[Admitted]) -> list[tuple[Any, ...]]:
    return [(a.number, a.source, a.epoch, a.index, a.example.prompt, tuple(a.prompt.tolist())) for a in admitted]


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 5), st.booleans())
def test_any_split_of_takes_gives_the_same_sequence(
    sources: list[LoadedSource], parts: list[int], seed: int, shuffle: bool
) -> None:
    whole = what(PromptLoader(sources, seed, shuffle).peek(range(sum(parts))))
    loader = PromptLoader(sources, seed, shuffle)
    assert [entry for part in parts for entry in what(loader.peek(loader.advance(part)))] == whole
    assert [entry[0] for entry in whole] == list(range(sum(parts)))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5))
def test_a_restored_loader_continues_exactly(sources: list[LoadedSource], before: int, after: int, seed: int) -> None:
    loader = PromptLoader(sources, seed)
    loader.peek(loader.advance(before))
    state = json.loads(json.dumps(loader.state()))
    resumed = PromptLoader(sources, seed)
    resumed.restore(state)
    assert resumed.admitted == loader.admitted
    assert what(resumed.peek(resumed.advance(after))) == what(loader.peek(loader.advance(after)))


@given(st.lists(st.integers(0, 500), max_size=10))
def test_peek_works_for_any_number_without_advancing(sources: list[LoadedSource], numbers: list[int]) -> None:
    loader = PromptLoader(sources, 1)
    sequence = what(PromptLoader(sources, 1).peek(range(501)))
    assert what(loader.peek(numbers)) == [sequence[number] for number in numbers]
    assert loader.admitted == 0


def test_every_example_comes_exactly_once_in_each_epoch_of_its_source(sources: list[LoadedSource]) -> None:
    admitted = PromptLoader(sources, 3).peek(range(200))
    for position, source in enumerate(sources):
        mine = [a for a in admitted if a.source == position]
        assert len(mine) >= 2 * len(source)
        for start in range(0, len(mine) - len(source) + 1, len(source)):
            epoch = mine[start : start + len(source)]
            assert sorted(a.index for a in epoch) == list(range(len(source)))
            assert {a.epoch for a in epoch} == {start // len(source)}


def test_an_epoch_has_the_prompts_of_all_sources(make: Make) -> None:
    loader = PromptLoader([make(4), make(4, 3.0)])
    assert Counter(admitted.epoch for admitted in loader.peek(loader.advance(32)) if admitted.source == 0) == {
        0: 4,
        1: 4,
    }
    assert loader.epoch_size == 8


def test_sources_are_drawn_by_their_weights(sources: list[LoadedSource]) -> None:
    counts = Counter(a.source for a in PromptLoader(sources, 5).peek(range(700)))
    assert [counts[i] for i in range(3)] == pytest.approx([200, 400, 100], abs=3)


def test_another_seed_or_epoch_gives_another_order(make: Make) -> None:
    source = [make(50)]
    first = PromptLoader(source, 0).peek(range(100))
    other = PromptLoader(source, 1).peek(range(50))
    assert [a.index for a in first[:50]] != [a.index for a in other]
    assert [a.index for a in first[:50]] != [a.index for a in first[50:]]


def test_without_shuffling_the_order_is_the_files(make: Make) -> None:
    assert [a.index for a in PromptLoader([make(3)], shuffle=False).peek(range(7))] == [0, 1, 2, 0, 1, 2, 0]


def test_a_checkpoint_of_other_data_is_refused(make: Make) -> None:
    state = PromptLoader([make(4)], 1).state()
    for name, was, now, loader in (
        ("seed", 1, 2, PromptLoader([make(4)], 2)),
        ("prompts", [4], [5], PromptLoader([make(5)], 1)),
        ("weights", [1.0], [2.0], PromptLoader([make(4, 2.0)], 1)),
        ("shuffle", True, False, PromptLoader([make(4)], 1, shuffle=False)),
    ):
        with pytest.raises(UserError) as caught:
            loader.restore(state)
        said = str(caught.value)
        assert f"{name} {was}" in said and f"this run has {now}; resume" in said


def test_a_loader_without_sources_is_refused() -> None:
    with pytest.raises(UserError, match=r"no prompts .*give data.train a file"):
        PromptLoader([])

"""Every sampler gives ready rows, each once, at most as many as wanted, and leaves none for ever; a user's own too."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.queue.samplers import SAMPLERS, Candidate, check_sampler, checked, sampler_named

EXAMPLE = Path(__file__).parents[2] / "examples" / "longest_first.py"


@pytest.mark.parametrize("name", [*SAMPLERS, f"{EXAMPLE}:longest_first"])
def test_every_sampler_keeps_the_contract(name: str) -> None:
    check_sampler(name)


candidates = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=24).map(
    lambda rows: [Candidate(n, group, 4, tokens, version) for n, (group, tokens, version) in enumerate(rows)]
)


@pytest.mark.parametrize("name", list(SAMPLERS))
@given(ready=candidates, most=st.integers(1, 30), ranks=st.integers(1, 8))
def test_whatever_is_ready_some_rows_of_it_are_chosen_once_each(
    name: str, ready: Sequence[Candidate], most: int, ranks: int
) -> None:
    chosen = checked(sampler_named(name), ready, most, ranks)
    assert chosen == checked(sampler_named(name), ready, most, ranks)


def rows(
    tokens: Sequence[int], groups: Sequence[int] | None = None, versions: Sequence[int] | None = None
) -> list[Candidate]:
    sizes = groups or [0] * len(tokens)
    return [Candidate(n, sizes[n], 2, length, versions[n] if versions else 0) for n, length in enumerate(tokens)]


def chosen(name: str, ready: Sequence[Candidate], most: int, ranks: int = 1) -> list[int]:
    return list(sampler_named(name).choose(ready, most, ranks))


def test_built_in_samplers_choose_what_their_names_say() -> None:
    lengths = rows([5, 90, 6, 80, 1])
    assert chosen("first_in", lengths, 2) == [0, 1]
    assert chosen("shortest_first", lengths, 2) == [4, 0]
    assert chosen("token_balanced", lengths, 3, ranks=2) == [0, 2]
    assert chosen("oldest_version", rows([1, 1, 1], versions=[2, 0, 1]), 2) == [1, 2]
    assert chosen("whole_groups", rows([1] * 5, groups=[0, 1, 1, 2, 2]), 3) == [1, 2]
    assert chosen("whole_groups", rows([1] * 2, groups=[0, 1]), 1) == [0], "no group is whole: the oldest rows"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[]", "chose \\[\\] of 2 rows"),
        ("[0, 0]", "different positions"),
        ("[2]", "chose \\[2\\] of 2"),
        ("[0, 1]", "at most 1"),
        ("1 / 0", "ZeroDivisionError: .*\\(broken.py:2\\); mend the function"),
    ],
)
def test_a_sampler_that_breaks_the_contract_is_named(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(f"def broken(ready, most, ranks):\n    return {body}\n")
    with pytest.raises(UserError, match=words):
        checked(sampler_named(f"{path}:broken"), rows([1, 1]), 1, 1)


def test_unknown_name_error_suggests_nearest() -> None:
    with pytest.raises(UserError, match="first_in"):
        sampler_named("frist_in")

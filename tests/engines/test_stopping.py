"""Stop texts are found at the token that completes them, wherever tokens end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.engines.requests import Request, SamplingParams, row_of
from tests.engines.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Return the number of tokens of `text` at which a stop text is found."""
    request = Request((0, 0, 0), torch.zeros(1, dtype=torch.int64), SamplingParams(stop=stops))
    row = row_of(request, TOKENIZER, (), 512)
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        if row.record_token(token):
            return count
    return None


@given(st.text("ab\né ", max_size=60), st.text("ab\né ", min_size=1, max_size=8))
def test_a_row_stops_exactly_where_its_text_first_contains_the_stop_text(text: str, stop: str) -> None:
    result = text.find(stop)
    expected = None if result < 0 else len(text[: result + len(stop)].encode())
    assert first_stop(text, (stop,)) == expected


def test_the_first_of_several_stop_texts_counts() -> None:
    assert first_stop("one two three", ("three", "two")) == 7


def test_a_stop_text_may_be_a_special_token() -> None:
    assert first_stop("ab<end>cd", ("<end>",)) == 3

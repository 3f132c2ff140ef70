"""Stop texts are found at the token that completes them, wherever tokens end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braidrl.engines.row_request import StopTexts
from tests.engines.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Return the number of tokens of `text` at which a stop text is found."""
    watch = StopTexts(TOKENIZER, stops)
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        if watch.contains_stop_text(token):
            return count
    return None


@given(st.text("ab\né ", max_size=60), st.text("ab\né ", min_size=1, max_size=8))
def test_a_row_stops_exactly_where_its_text_first_contains_the_stop_text(text: str, stop: str) -> None:
    found = text.find(stop)
    expected = None if found < 0 else len(text[: found + len(stop)].encode())
    assert first_stop(text, (stop,)) == expected


def test_the_first_of_several_stop_texts_counts() -> None:
    assert first_stop("one two three", ("three", "two")) == 7


def test_a_stop_text_may_be_a_special_token() -> None:
    assert first_stop("ab<end>cd", ("<end>",)) == 3

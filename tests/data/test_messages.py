"""Messages arrive unchanged, with the type that the reader names."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.process import Failure, Outcome
from braidrl.data.messages import pack_message, unpack_message
from braidrl.observe.stalls import Stall

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@dataclass
class Place:
    """Two fields of different types."""

    rank: int
    name: str


@given(PLAIN)
def test_plain_values_come_back_equal(value: object) -> None:
    assert unpack_message(pack_message(value)) == value


@pytest.mark.parametrize(
    "word", [None, Stall("step", 2.0, 0.1), Outcome({"a": [1, 2.5, "x"]}), Outcome(failure=Failure("user", "no", True))]
)
def test_each_message_type_arrives_with_its_type(word: Stall | Outcome | None) -> None:
    message = unpack_message(pack_message(word), Stall | Outcome | None)
    assert message == word and type(message) is type(word)


@pytest.mark.parametrize("sent", [{"rank": 1}, {"rank": "1", "name": "a"}, [1, "a"], None])
def test_a_message_of_another_type_is_refused(sent: object) -> None:
    assert unpack_message(pack_message(Place(1, "a")), Place) == Place(1, "a")
    with pytest.raises(ValueError, match=r"Expected|missing"):
        unpack_message(pack_message(sent), Place)


def test_invalid_message_bytes_are_refused() -> None:
    with pytest.raises(ValueError):
        unpack_message(b"\xc1")

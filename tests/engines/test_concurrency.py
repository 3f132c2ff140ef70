"""Rows begin by the room of an engine's keys and values: no block too many, and at once when shorter rows are seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braidrl.engines.concurrency import KNOWN, RECENT, ExpectedShare, RowTokens, rows_to_begin

LIMITS = st.integers(1, 40)
ROWS = st.lists(
    st.builds(lambda prompt, limit, part: RowTokens(prompt, part % limit, limit), LIMITS, LIMITS, LIMITS), max_size=8
)


def blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


@given(st.integers(0, 400), st.integers(1, 16), st.floats(0, 1), ROWS, ROWS)
def test_rows_begin_while_what_they_are_expected_to_draw_fits(
    capacity: int, block: int, share: float, running: list[RowTokens], waiting: list[RowTokens]
) -> None:
    begun = rows_to_begin(capacity, block, share, running, waiting)
    whole = rows_to_begin(capacity, block, 1.0, running, waiting)
    assert 0 <= whole <= begun <= len(waiting)
    if waiting and not running:
        assert begun >= 1, "an engine without rows draws the first one"
    if whole > 1 or (whole and running):
        together = [*running, *waiting[:whole]]
        assert sum(blocks(row.prompt + row.limit, block) for row in together) <= capacity, "none can be preempted"


def test_rows_are_counted_whole_until_lengths_are_known_and_after_a_preemption() -> None:
    share = ExpectedShare()
    for _ in range(KNOWN - 1):
        share.finished(RowTokens(5, 10, 100))
    assert share.value == 1.0
    share.finished(RowTokens(5, 20, 100))
    assert share.value == 0.2
    waiting = [RowTokens(5, 0, 100)] * 10
    assert rows_to_begin(105, 1, share.value, [], waiting) == 4
    share.preempted()
    assert share.value == 1.0 and rows_to_begin(105, 1, share.value, [], waiting) == 1
    for _ in range(RECENT):
        share.finished(RowTokens(5, 30, 100))
    assert share.value == 0.3

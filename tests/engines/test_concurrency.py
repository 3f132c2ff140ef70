"""Rows begin by the room of an engine's keys and values: no block too many, and at once when shorter rows are seen."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.engines.requests import KNOWN, RECENT, EngineRow, Request, SamplingParams, rows_to_begin

LIMITS = st.integers(1, 40)


def row(prompt: int, drawn: int, limit: int) -> EngineRow:
    request = Request((0, 0, 0), torch.zeros(prompt, dtype=torch.int64), SamplingParams(max_tokens=limit))
    return EngineRow(request, limit, tokens=[0] * drawn)


ROWS = st.lists(
    st.builds(lambda prompt, limit, part: row(prompt, part % limit, limit), LIMITS, LIMITS, LIMITS), max_size=8
)


def blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


@given(st.integers(0, 400), st.integers(1, 16), st.floats(0, 1), ROWS, ROWS)
def test_rows_begin_while_what_they_are_expected_to_draw_fits(
    capacity: int, block: int, share: float, running: list[EngineRow], waiting: list[EngineRow]
) -> None:
    started = rows_to_begin(capacity, block, [share] * KNOWN, running, waiting)
    whole = rows_to_begin(capacity, block, [], running, waiting)
    assert 0 <= whole <= started <= len(waiting)
    if waiting and not running:
        assert started >= 1, "an engine without rows draws the first one"
    if whole > 1 or (whole and running):
        together = [*running, *waiting[:whole]]
        assert sum(blocks(len(row.request.prompt) + row.limit, block) for row in together) <= capacity, (
            "none can be preempted"
        )


def test_rows_are_counted_whole_until_lengths_are_known_and_after_a_preemption() -> None:
    recent, waiting = deque([0.1] * (KNOWN - 1), maxlen=RECENT), [row(5, 0, 100)] * 10
    assert rows_to_begin(105, 1, recent, [], waiting) == 1
    recent.append(0.2)
    assert rows_to_begin(105, 1, recent, [], waiting) == 4
    recent.append(1.0)
    assert rows_to_begin(105, 1, recent, [], waiting) == 1
    recent.extend([0.3] * RECENT)
    assert rows_to_begin(105, 1, recent, [], waiting) == 3

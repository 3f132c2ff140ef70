"""Curves: scales on round numbers, gaps where there is no number, thinning that keeps means."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.observe.chart import (
    Frame,
    Series,
    line_chart,
    moving_mean,
    nice_range,
    path,
    spell,
    stacked_chart,
    thinned,
    ticks,
)

numbers = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))


@given(numbers, numbers)
def test_ranges_hold_what_they_must_show_and_end_on_ticks(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    shown_low, shown_high = nice_range(low, high)
    slack = 1e-6 * max(abs(low), abs(high))
    assert shown_low <= low + slack and high - slack <= shown_high
    assert shown_high > shown_low
    marks = ticks(shown_low, shown_high, 5)
    assert 2 <= len(marks) <= 8
    assert marks[0] == pytest.approx(shown_low, abs=slack) and marks[-1] == pytest.approx(shown_high, abs=slack)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.2, 0.9, (0.0, 1.0)), (31.0, 33.0, (31.0, 33.0)), (-0.9, -0.3, (-1.0, 0.0)), (0.0, 0.0, (-1.0, 1.0)), (3, 3, (0, 6))],
)  # fmt: skip
def test_ranges_begin_at_zero_where_that_wastes_little(low: float, high: float, shown: tuple[float, float]) -> None:
    assert nice_range(low, high) == pytest.approx(shown)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0312, "0.0312"), (12.44, "12.4"), (3180, "3,180"), (31800, "31.8k"), (999_999, "1,000k"), (1.2e6, "1.2M"),
     (1e-6, "1.0e-06"), (-0.5, "-0.5"), (1e-3, "0.001"), (123.4, "123")],
)  # fmt: skip
def test_numbers_are_spelled_short(value: float, text: str) -> None:
    assert spell(value) == text


def test_a_curve_has_a_gap_where_there_is_no_number() -> None:
    frame = Frame(0, 4, 0, 1)
    drawn = path([(0, 0.5), (1, 0.5), (2, None), (3, 0.5), (4, 0.5)], "curve", "red", frame)
    commands = re.search(r'd="([^"]+)"', drawn)
    assert commands is not None
    assert re.sub(r"[\d. ]", "", commands[1]) == "MLML"


def test_thinning_keeps_the_mean_and_bounds_the_points() -> None:
    values = tuple(math.sin(i) for i in range(1000))
    few = thinned(Series("x", tuple(range(1000)), values), 250)
    assert len(few.steps) == 250
    assert sum(few.numbers) / 250 == pytest.approx(sum(values) / 1000)
    assert thinned(Series("x", (1, 2), (1.0, None)), 2) == Series("x", (1, 2), (1.0, None))


def test_the_moving_mean_leaves_out_what_is_missing() -> None:
    assert moving_mean([1.0, None, 3.0, 5.0], 1) == [1.0, None, 4.0, 4.0]


def test_bars_are_stacked_to_the_total_of_each_step() -> None:
    generate = Series("generate", (1, 2), (2.0, 3.0))
    update = Series("update", (1, 2, 3), (1.0, 1.0, 4.0))
    html = stacked_chart("Seconds", [generate, update])
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', html)]
    assert len(heights) == 5
    # In the order drawn: generate of steps 1 and 2, update of steps 1, 2 and 3.
    assert [h / heights[2] for h in heights] == pytest.approx([2, 3, 1, 1, 4], rel=1e-3)


def test_names_are_escaped_and_values_are_there_for_the_pointer() -> None:
    html = line_chart("a < b", [Series("eval/<b>/avg@8", (1, 2), (0.25, None))], "x & y")
    assert "<b>/avg" not in html and "a &lt; b" in html and "x &amp; y" in html
    embedded = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert data["steps"] == ["1", "2"]
    assert data["series"][0]["values"] == ["0.25", None]

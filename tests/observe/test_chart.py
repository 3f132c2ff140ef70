"""Charts have gaps where a number is missing, thinning that keeps means, and a legend with the last values."""

import json
import math

import pytest

from braidrl.observe.report import MOST_BARS, MOST_POINTS, SMOOTH_FROM, Series, chart, spell


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0312, "0.0312"),
        (12.44, "12.4"),
        (3180, "3,180"),
        (31800, "31.8k"),
        (999_999, "1,000k"),
        (1.2e6, "1.2M"),
        (1e-6, "1.0e-06"),
        (-0.5, "-0.5"),
        (1e-3, "0.001"),
        (123.4, "123"),
    ],
)
def test_numbers_are_spelled_short(value: float, text: str) -> None:
    assert spell(value) == text


def test_a_curve_has_a_gap_where_there_is_no_number() -> None:
    (trace,) = chart("Entropy", [Series("entropy", (1, 2, 3), (0.5, None, 0.25))]).traces
    assert json.loads(json.dumps(trace))["y"] == [0.5, None, 0.25]
    # Plotly's own default, by which a null interrupts the line.
    assert "connectgaps" not in trace


def test_few_points_are_dots_and_many_are_faint_behind_their_mean() -> None:
    few = chart("x", [Series("x", (1, 2), (1.0, 2.0))]).traces
    assert [trace["mode"] for trace in few] == ["lines+markers"]
    values = tuple(math.sin(i) for i in range(SMOOTH_FROM))
    raw, smooth = chart("x", [Series("x", tuple(range(SMOOTH_FROM)), values)]).traces
    assert raw["y"] == values and raw["opacity"] < 1
    assert smooth["y"][20] == pytest.approx(sum(values[18:23]) / 5) and smooth["line"] == raw["line"]


def test_thinning_keeps_the_mean_and_bounds_the_points() -> None:
    values = tuple(math.sin(i) for i in range(1000))
    (bars,) = chart("x", [Series("x", tuple(range(1000)), values)], stacked=True).traces
    assert len(bars["x"]) == len(bars["y"]) == MOST_BARS and bars["x"][:2] == (5, 15)
    assert sum(bars["y"]) / MOST_BARS == pytest.approx(sum(values) / 1000)
    long = chart("x", [Series("x", tuple(range(1000)), values)], "nats")
    assert all(len(trace["x"]) <= MOST_POINTS for trace in long.traces) and long.about == "nats, means of 3 steps"


def test_the_moving_mean_skips_missing_points() -> None:
    values = (1.0, None, 3.0, 5.0, *[5.0] * SMOOTH_FROM)
    _, smooth = chart("x", [Series("x", tuple(range(len(values))), values)]).traces
    assert smooth["y"][:3] == [2.0, None, 3.5]


def test_chart_traces_match_legend_colours_and_last_values() -> None:
    series = [Series("generate", (1, 2), (2.0, 3.0)), Series("update", (1, 2, 3), (1.0, 1.0, 4.0))]
    for drawn in (chart("Seconds", series, stacked=True), chart("Seconds", series)):
        assert [(curve["name"], curve["last"]) for curve in drawn.curves] == [("generate", "3"), ("update", "4")]
        painted = [(trace.get("marker") or trace["line"])["color"] for trace in drawn.traces]
        assert painted == [curve["colour"] for curve in drawn.curves] and len(set(painted)) == 2

"""The HTML templates of `assets`, which escape all values, and charts for plotly.js.

A chart shows curves or stacked bars over steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = Environment(
    loader=PackageLoader("braidrl.observe", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    undefined=StrictUndefined,
)  # fmt: skip
MOST_POINTS = 400
MOST_BARS = 100
SMOOTH_FROM = 40
DOTS_UP_TO = 30
PALETTE = (
    "#2a78d6", "#eb6834", "#1baf7a", "#9154cf", "#eda100", "#e0518f", "#1497b0", "#8a6a3c", "#6b8e23", "#c23b3b",
    "#5b6f95", "#7a7a7a",
)  # fmt: skip


class Tile(NamedTuple):
    """A headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Series:
    """A curve: one value per step. None is a gap."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]

    @property
    def numbers(self) -> list[float]:
        return [value for value in self.values if value is not None]


class Curve(NamedTuple):
    """An entry of a chart's legend; `last` is the last value."""

    name: str
    colour: str
    last: str


class Chart(NamedTuple):
    """A chart as the page shows it, with the traces that plotly.js draws."""

    title: str
    about: str
    curves: list[Curve]
    traces: list[dict[str, Any]]
    stacked: bool


def chart(title: str, series: Sequence[Series], about: str = "", stacked: bool = False) -> Chart:
    """Return a chart of several series as curves or `stacked` bars; `about` is a line below the title.

    A point of a long series is the mean over equally many steps, placed at their middle. If all names share the part before the
    first slash, the legend leaves it out.
    """
    if len(series) > 1 and len({one.name.partition("/")[0] for one in series}) == 1:
        series = [replace(one, name=one.name.partition("/")[2]) for one in series]
    curves, traces, longest_mean = list[Curve](), list[dict[str, Any]](), 1
    for number, whole in enumerate(series):
        paint, shown = PALETTE[number % len(PALETTE)], whole
        curves.append(Curve(whole.name, paint, spell(whole.numbers[-1])))
        size = math.ceil(len(whole.steps) / (MOST_BARS if stacked else MOST_POINTS))
        if size > 1:
            longest_mean = max(longest_mean, size)
            stretches = [slice(i, i + size) for i in range(0, len(whole.steps), size)]
            middles = tuple(whole.steps[s][len(whole.steps[s]) // 2] for s in stretches)
            shown = Series(whole.name, middles, tuple(mean(whole.values[s]) for s in stretches))
        trace: dict[str, Any] = {"x": shown.steps, "y": shown.values, "name": shown.name}
        curve = {**trace, "line": {"color": paint}, "mode": "lines"}
        if stacked:
            traces.append({**trace, "type": "bar", "marker": {"color": paint}})
        elif len(shown.numbers) < SMOOTH_FROM:
            # Few points get dots.
            traces.append(curve | {"mode": "lines+markers" if len(shown.numbers) <= DOTS_UP_TO else "lines"})
        else:
            # Many points are drawn faintly behind their moving mean.
            reach = max(2, len(shown.values) // 30)
            smooth = [
                None if value is None else mean(shown.values[max(0, i - reach) : i + reach + 1])
                for i, value in enumerate(shown.values)
            ]
            traces += [curve | {"opacity": 0.32}, curve | {"y": smooth, "hoverinfo": "skip"}]
    note = ", ".join(filter(None, [about, f"means of {longest_mean} steps" if longest_mean > 1 else ""]))
    return Chart(title, note, curves, traces, stacked)


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def spell(value: float) -> str:
    """Format a number in short: 0.0312, 12.4, 3,180, 31.8k, 1.2M, 1.0e-06."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4):
            scaled = value / unit
            return f"{scaled:,.0f}{letter}" if abs(scaled) >= 100 else f"{scaled:.3g}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"

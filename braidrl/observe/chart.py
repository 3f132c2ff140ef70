"""Curves and stacked bars as inline SVG, with the values beside them for the hover script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.observe.page import colour, embed, escape

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 24
MOST_POINTS = 400
MOST_BARS = 100
SMOOTH_FROM = 40
DOTS_UP_TO = 30


@dataclass(frozen=True)
class Series:
    """A curve: a value for each step, None where there is none (the curve has a gap there)."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]

    @property
    def numbers(self) -> list[float]:
        return [value for value in self.values if value is not None]


@dataclass(frozen=True)
class Frame:
    """The visible range: steps from `first` to `last`, values from `low` to `high`."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        part = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, series: Sequence[Series], about: str = "") -> str:
    """Draw a curve for each series; many points are thinned, and noisy ones drawn faint behind their mean."""
    shown = [thinned(one, MOST_POINTS) for one in series]
    frame = frame_of(shown)
    drawn = "".join(curve(one, colour(number), frame) for number, one in enumerate(shown))
    return figure(title, series, shown, about, frame, drawn)


def stacked_chart(title: str, series: Sequence[Series], about: str = "") -> str:
    """Draw a bar for each step (or stretch of steps), with the series stacked in the order given."""
    shown = [thinned(one, MOST_BARS) for one in aligned(series)]
    steps = shown[0].steps
    low, high = nice_range(0.0, max(sum(one.values[i] or 0.0 for one in shown) for i in range(len(steps))))
    half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
    frame = Frame(steps[0] - half, steps[-1] + half, low, high)
    width = frame.x(half) - frame.x(-half)
    base = [0.0] * len(steps)
    drawn = []
    for number, one in enumerate(shown):
        tops = [below + (value or 0.0) for below, value in zip(base, one.values, strict=True)]
        for step, below, top in zip(steps, base, tops, strict=True):
            drawn.append(bar(frame, step, below, top, width - min(1.5, width / 4), colour(number)))
        base = tops
    return figure(title, series, shown, about, frame, "".join(drawn))


def bar(frame: Frame, step: float, below: float, top: float, width: float, paint: str) -> str:
    """Draw a part of a stacked bar, `width` pixels wide; nothing where it would be too thin to see."""
    height = frame.y(below) - frame.y(top)
    if height < 0.05:
        return ""
    place = f'x="{frame.x(step) - width / 2:.2f}" y="{frame.y(top):.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{paint}"/>'


def figure(title: str, series: Sequence[Series], shown: Sequence[Series], about: str, frame: Frame, drawn: str) -> str:
    """Put a chart into its frame: title, legend with the last values of `series`, axes, and the values `shown` for the script."""
    stretch = max(math.ceil(len(one.steps) / len(few.steps)) for one, few in zip(series, shown, strict=True))
    told = ", ".join(filter(None, [about, f"means of {stretch} steps" if stretch > 1 else ""]))
    caption = f'<h3>{escape(title)}</h3><p class="about">{escape(told) or "&nbsp;"}</p>{legend(series)}'
    return (
        f'<figure class="card chart"><figcaption>{caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps">'
        f"{axes(frame)}{drawn}"
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>{embed(hover_data(shown, frame))}</figure>'
    )


def axes(frame: Frame) -> str:
    parts = []
    for value in ticks(frame.low, frame.high, 5):
        y = frame.y(value)
        kind = "axis" if value == frame.low else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{escape(spell(value))}</text>')
    for step in ticks(frame.first, frame.last, 7):
        if step == int(step):
            parts.append(
                f'<text x="{frame.x(step):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{escape(spell(step))}</text>'
            )
    return "".join(parts)


def legend(series: Sequence[Series]) -> str:
    entries = [
        f'<span><i style="background:{colour(number)}"></i>{escape(one.name)}<b>{escape(spell(one.numbers[-1]))}</b></span>'
        for number, one in enumerate(series)
    ]
    return f'<div class="legend">{"".join(entries)}</div>'


def hover_data(series: Sequence[Series], frame: Frame) -> dict[str, Any]:
    """Return the values by step, and where steps lie in the picture."""
    steps = sorted({step for one in series for step in one.steps})
    listed = []
    for number, one in enumerate(series):
        known = dict(zip(one.steps, one.values, strict=True))
        values = [None if known.get(step) is None else spell(known[step] or 0.0) for step in steps]
        listed.append({"name": one.name, "colour": colour(number), "values": values})
    return {"steps": [f"{s:,.0f}" for s in steps], "x": [round(frame.x(s), 2) for s in steps], "series": listed}


def curve(series: Series, paint: str, frame: Frame) -> str:
    """Draw one series: dots where points are few, the moving mean on top of a faint line where they are many."""
    points = list(zip(series.steps, series.values, strict=True))
    if len(series.numbers) < SMOOTH_FROM:
        drawn = path(points, "curve", paint, frame)
        if len(series.numbers) <= DOTS_UP_TO:
            drawn += "".join(
                f'<circle class="dot" cx="{frame.x(step):.2f}" cy="{frame.y(value):.2f}" r="3.5" fill="{paint}"/>'
                for step, value in points
                if value is not None
            )
        return drawn
    smooth = moving_mean(series.values, max(2, len(points) // 30))
    return path(points, "raw", paint, frame) + path(list(zip(series.steps, smooth, strict=True)), "curve", paint, frame)


def path(points: Sequence[tuple[float, float | None]], kind: str, paint: str, frame: Frame) -> str:
    """Draw a line through the points, interrupted where a value is None."""
    parts, pen_down = [], False
    for step, value in points:
        if value is not None:
            parts.append(f"{'L' if pen_down else 'M'}{frame.x(step):.2f} {frame.y(value):.2f}")
        pen_down = value is not None
    return f'<path class="{kind}" stroke="{paint}" d="{"".join(parts)}"/>'


def frame_of(series: Sequence[Series]) -> Frame:
    """Return the frame of all steps, with a value range that begins at 0 where that wastes little."""
    steps = [step for one in series for step in one.steps]
    values = [value for one in series for value in one.numbers]
    return Frame(min(steps), max(steps), *nice_range(min(values), max(values)))


def nice_range(low: float, high: float) -> tuple[float, float]:
    """Return a range around [low, high] that ends on round numbers and is not empty."""
    if 0 <= low <= 0.6 * high:
        low = 0.0
    elif 0.6 * low <= high <= 0:
        high = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        low, high = (0.0, 2 * high) if low > 0 else (low - margin, high + margin)
    step = 0.0
    # A wider range may need a larger step, and that a wider range, until both ends are ticks.
    while step < (wanted := nice_step(high - low, 5)):
        step = wanted
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return low, high


def nice_step(span: float, count: int) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that divides `span` into at most `count` parts."""
    rough = span / count
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from low to high, about `count` of them."""
    if high <= low:
        return [low]
    step = nice_step(high - low, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Rounding keeps 3 * 0.1 from being spelled 0.30000000000000004.
    return [round(k * step, 12 - math.floor(math.log10(step))) for k in range(first, last + 1)]


def aligned(series: Sequence[Series]) -> list[Series]:
    """Return the same series, all with every step that one of them has; None where one has no value."""
    steps = tuple(sorted({step for one in series for step in one.steps}))
    known = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    return [Series(one.name, steps, tuple(map(values.get, steps))) for one, values in zip(series, known, strict=True)]


def thinned(series: Series, most: int) -> Series:
    """Return at most `most` points: stretches of equally many steps, each with its mean, at its middle."""
    size = math.ceil(len(series.steps) / most)
    if size <= 1:
        return series
    stretches = [slice(i, i + size) for i in range(0, len(series.steps), size)]
    middles = tuple(series.steps[s][len(series.steps[s]) // 2] for s in stretches)
    return Series(series.name, middles, tuple(mean(series.values[s]) for s in stretches))


def moving_mean(values: Sequence[float | None], reach: int) -> list[float | None]:
    """Average each value with the `reach` before and after it; None stays None."""
    return [
        None if value is None else mean(values[max(0, i - reach) : i + reach + 1]) for i, value in enumerate(values)
    ]


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def spell(value: float) -> str:
    """Spell a number short enough for an axis: 0.0312, 12.4, 3,180, 31.8k, 1.2M, 1.0e-06."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4):
            scaled = value / unit
            return f"{scaled:,.0f}{letter}" if abs(scaled) >= 100 else f"{scaled:.3g}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"

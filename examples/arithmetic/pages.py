"""Content of the pages of results: curves as separate SVG files, tables, and summaries of a run's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 28, 28
COLOURS = ("#3567b0", "#c0563b", "#3f8f5f", "#8a5bb0", "#b08a2e", "#3c8f9f", "#a0487a", "#6b6b6b")

BY_HAND = "<!-- What follows was written by hand and stays when the page is written again. -->"

Curve = Sequence[tuple[float, float]]
"""(step, value) in the order of steps."""
Lines = list[dict[str, Any]]
"""A run's metrics, one dictionary per line."""


def write_markdown(path: Path, text: str) -> None:
    """Write a page of Markdown. If the page exists, its text below the line `BY_HAND` stays at the end."""
    _, line, notes = path.read_text().partition(BY_HAND) if path.is_file() else ("", "", "")
    path.write_text(text.rstrip("\n") + "\n" + (f"\n{line}{notes}" if line else ""))


def write_curves(path: Path, title: str, curves: Mapping[str, Curve], limit: float | None = None) -> None:
    """Draw one axis with a named line for each curve, and a dashed line at `limit`."""
    points = [point for curve in curves.values() for point in curve]
    low = min([y for _, y in points] + ([] if limit is None else [limit]))
    high = max([y for _, y in points] + ([] if limit is None else [limit]))
    last = max(x for x, _ in points)
    span = high - low or 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + x / (last or 1) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (y - low) / span * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="14" font-size="13">{escape(title)}</text>',
    ]
    for value in (low, (low + high) / 2, high):
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{round(value, 3):.3g}</text>')
    for step in (0, last):
        parts.append(
            f'<text x="{place(step, low).split(",")[0]}" y="{HEIGHT - 10}" text-anchor="middle">{step:g}</text>'
        )
    if limit is not None:
        line = f"{place(0, limit)} {place(last, limit)}"
        parts.append(f'<polyline points="{line}" stroke="#333" stroke-dasharray="4 3" fill="none"/>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(x, y) for x, y in curve)
        parts.append(f'<polyline points="{line}" stroke="{colour}" fill="none" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{TOP + 12 * number}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def curve(lines: Lines, key: str) -> Curve:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def last_quarter(lines: Lines, key: str) -> float:
    """Return the mean over the last quarter of the steps."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return fmean(values[-max(1, len(values) // 4) :])


def mean_curve(runs: Sequence[Lines], key: str) -> Curve:
    """Return the mean of curves that were measured at the same steps."""
    points = zip(*(curve(lines, key) for lines in runs), strict=True)
    return [(at[0][0], fmean(value for _, value in at)) for at in points]


STUDENTS_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Half-width of a 95% interval in standard errors, by degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and half of its 95% interval, which is infinite for one seed."""

    mean: float
    half: float

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        """Return the mean of up to ten values, with an interval by Student's t."""
        count = len(values)
        half = STUDENTS_T[count - 1] * stdev(values) / sqrt(count) if count > 1 else inf
        return Mean(fmean(values), half)

    def text(self, form: str) -> str:
        """The mean as text for a table, like 0.712 ± 0.031."""
        return format(self.mean, form) + (f" ± {self.half:.3f}" if self.half < inf else "")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


def generated(lines: Lines) -> float:
    """Return the response tokens sampled for training."""
    return float(sum(line["tokens/generated"] or 0 for line in lines))


def seconds(lines: Lines) -> float:
    return float(sum(line["time/step"] or 0 for line in lines))

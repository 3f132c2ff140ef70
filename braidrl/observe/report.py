"""`report.html`: what a run learned, on one page that needs nothing but itself."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidrl.observe.chart import SMOOTH_FROM, Series, line_chart, mean, spell, stacked_chart
from braidrl.observe.metrics import read_metrics
from braidrl.observe.page import escape, page, tile
from braidrl.observe.progress import spell_seconds
from braidrl.observe.samples import samples_html

Lines = Sequence[dict[str, Any]]
Curves = Mapping[str, Series]
# The first and the last steps that a headline number is the mean of: one batch alone is noise.
HEADLINE_STEPS = 5


@dataclass(frozen=True)
class Chart:
    """Metrics, named whole or by a pattern, that belong in one picture."""

    title: str
    keys: tuple[str, ...]
    about: str = ""
    draw: Callable[..., str] = line_chart


EVALUATION = Chart("Evaluation", (r"eval/.+/avg@\d+",), "mean over held-out prompts and their responses")
HEADLINES = (("Reward", "reward/mean"), ("Response length", "response/length_mean"), ("Entropy", "actor/entropy"))
SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "What it learned",
        (
            EVALUATION,
            Chart("Evaluation, best of k", (r"eval/.+/pass@\d+",), "share of prompts with a right answer among k"),
            Chart("Reward and score", ("reward/mean", "score/mean"), "training batch; reward is the score as shaped"),
        ),
    ),
    (
        "What it writes",
        (
            Chart("Response length", ("response/length_mean",), "tokens"),
            Chart("Cut off at the length limit", ("response/truncated_fraction",), "share of responses"),
            Chart("Groups without a signal", (r"groups/all_.+_fraction",), "share of prompts"),
        ),
    ),
    (
        "How training goes",
        (
            Chart("Entropy", ("actor/entropy",), "nats per token"),
            Chart("Log-probability of sampled tokens", ("actor/log_prob_mean",), "mean over action tokens"),
            Chart("KL from the old policy", ("actor/kl_old",), "nats per token"),
            Chart("Clipped tokens", ("actor/clip_fraction",), "share of action tokens"),
            Chart("Gradient norm", ("actor/grad_norm",), "before clipping"),
            Chart("Actor loss", ("loss/actor",), "on-policy its value is near 0, its gradient is not"),
        ),
    ),
    (
        "How it runs",
        (
            Chart("Seconds per stage", (r"time/(?!step$).+",), "stacked", stacked_chart),
            Chart("Seconds per step", ("time/step",), "wall clock, everything included"),
            Chart("Throughput", ("throughput/tokens_per_second",), "prompt and response tokens per second"),
            Chart("Tokens", ("tokens/generated", "tokens/trained"), "per step"),
            Chart(
                "Engine against trainer", ("train/rollout_log_prob_gap",), "difference in log-probs of the same tokens"
            ),
            Chart("Staleness", ("staleness/max",), "versions between sampling and training"),
        ),
    ),
)


def write_report(run: Path) -> Path:
    """Write `run`/report.html from its metrics and recorded rollouts. Raises UserError where the run has no metrics."""
    lines = read_metrics(run)
    curves = curves_of(lines)
    known = {one.name for _, charts in SECTIONS for chart in charts for one in matching(chart, curves)}
    other = [Chart(name, (re.escape(name),)) for name in curves if name not in known]
    name = run.resolve().name
    body = [
        f"<header><h1>{escape(name)}</h1><p>{escape(summary(lines))}</p></header>",
        f'<section class="tiles">{"".join(headline(curves))}</section>',
        *(section(title, charts_html(charts, curves)) for title, charts in SECTIONS),
        samples_html(run),
        folded(f"Other metrics ({len(other)})", charts_html(other, curves)),
        folded("Configuration", configuration(run)),
    ]
    path = run / "report.html"
    path.write_text(page(f"{name}: report", "\n".join(filter(None, body)), "chart.js"), encoding="utf-8")
    return path


def curves_of(lines: Lines) -> Curves:
    """Collect each metric that has a number, over the steps that report it, in the order in which metrics first appear."""
    points: dict[str, list[tuple[int, float | None]]] = {}
    for line in lines:
        for key, value in line.items():
            # Nulls before the first number are steps that could not have one (an evaluation before training): no gap to show.
            if key not in ("step", "version") and (value is not None or key in points):
                points.setdefault(key, []).append((line["step"], value))
    return {key: Series(key, *map(tuple, zip(*found, strict=True))) for key, found in points.items()}


def matching(chart: Chart, curves: Curves) -> list[Series]:
    """Return the metrics that belong to the chart."""
    return [one for name, one in curves.items() if any(re.fullmatch(pattern, name) for pattern in chart.keys)]


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def charts_html(charts: Sequence[Chart], curves: Curves) -> str:
    found = [(chart, matching(chart, curves)) for chart in charts]
    drawn = [chart.draw(chart.title, short_names(series), chart.about) for chart, series in found if series]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def short_names(series: Sequence[Series]) -> list[Series]:
    """Shorten names by the part before the first slash, where all share it."""
    heads = {one.name.partition("/")[0] for one in series}
    if len(heads) > 1 or len(series) == 1:
        return list(series)
    return [replace(one, name=one.name.partition("/")[2]) for one in series]


def headline(curves: Curves) -> list[str]:
    """Make tiles from first to last value of the most important metrics."""
    evaluations = matching(EVALUATION, curves)
    tiles = [change(one.name.removeprefix("eval/").replace("/", " "), one, 1) for one in evaluations]
    tiles += [change(label, curves[name], HEADLINE_STEPS) for label, name in HEADLINES if name in curves]
    if "tokens/trained" in curves:
        speed = curves.get("throughput/tokens_per_second")
        told = f"{spell(mean(speed.numbers) or 0.0)} tokens/s on average" if speed else ""
        tiles.append(tile("Tokens trained", spell(sum(curves["tokens/trained"].numbers)), told))
    return tiles


def change(label: str, series: Series, steps: int) -> str:
    """Make a tile `0.31 → 0.88`, of means over the first and the last `steps` numbers."""
    numbers = series.numbers
    if len(numbers) == 1:
        return tile(label, spell(numbers[0]), f"at step {series.steps[0]}")
    count = max(1, min(steps, len(numbers) // 2))
    first, last = sum(numbers[:count]) / count, sum(numbers[-count:]) / count
    where = f"step {series.steps[0]} to {series.steps[-1]}" if count == 1 else f"first and last {count} steps"
    return tile(label, f"{spell(first)} → {spell(last)}", where)


def summary(lines: Lines) -> str:
    """Say how many steps took what time, and how to read the curves."""
    if not lines:
        return "No step has been written yet."
    seconds = sum(line.get("time/step") or 0.0 for line in lines)
    steps = lines[-1]["step"]
    told = f"{steps:,} step{'' if steps == 1 else 's'}, {spell_seconds(seconds)} of training."
    if len(lines) >= SMOOTH_FROM:
        told += " Strong curves are means over neighbouring steps, faint ones the steps themselves."
    return told


def configuration(run: Path) -> str:
    path = run / "config.yaml"
    return f'<pre class="card">{escape(path.read_text(encoding="utf-8"))}</pre>' if path.is_file() else ""


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""

"""`report.html`: the results of a run on one self-contained page, with recorded responses.

metrics.jsonl ──▶ curves by name ──▶ charts for plotly.js ───────────────────╮
rollouts/ ──▶ the same held-out prompts over time, best and worst rows ─┴─▶ assets/report.html, which escapes all
Trackers get the samples of a step.
"""

import functools
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from braidrl.data.records import whole_text
from braidrl.data.rows import FinishReason
from braidrl.errors import UserError, first_line
from braidrl.observe.episodes import thumbnails
from braidrl.observe.metrics import read_metrics, whole_file
from braidrl.observe.progress import spell_seconds
from braidrl.observe.rollouts import (
    PROMPT_TEXT,
    RESPONSE_TEXT,
    read_texts,
    recorded_evaluations,
    recorded_steps,
    rollout_path,
)

TEMPLATES = Environment(
    loader=PackageLoader("braidrl.observe", "assets"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
MOST_POINTS, MOST_BARS = 400, 100
MOST_FILES = 8
"""Files of a recording, one for each machine, whose rows are looked at for samples."""
SMOOTH_FROM = 40
DOTS_UP_TO = 30
PALETTE = (
    "#2a78d6",
    "#eb6834",
    "#1baf7a",
    "#9154cf",
    "#eda100",
    "#e0518f",
    "#1497b0",
    "#8a6a3c",
    "#6b8e23",
    "#c23b3b",
    "#5b6f95",
    "#7a7a7a",
)
# A headline number is the mean over this many first or last steps; a single batch is too noisy.
HEADLINE_STEPS = 5
HEADLINES = (("Reward", "reward/mean"), ("Response length", "response/length_mean"), ("Entropy", "actor/entropy"))
MOST_STEPS = 6
PROMPTS_PER_SET = 3
SHOWN_CHARACTERS = 4000
COLUMNS = ("score", "reward", "correct", "finish_reason", "metadata", "images")


class Picture(NamedTuple):
    """A chart of the report and its metrics, each a name or a pattern."""

    title: str
    keys: tuple[str, ...]
    about: str = ""
    stacked: bool = False


EVALUATION = Picture(
    "Evaluation",
    (r"eval/.+/avg@\d+", r"eval/.+/pair_accuracy"),
    "mean over held-out prompts and their responses, or share of pairs that are ranked right",
)
SECTIONS: dict[str, tuple[Picture, ...]] = {
    "What it learned": (
        EVALUATION,
        Picture("Evaluation, best of k", (r"eval/.+/pass@\d+",), "share of prompts with a right answer among k"),
        Picture("Reward and score", ("reward/mean", "score/mean"), "training batch; reward is the score as shaped"),
        Picture("Score of each verifier", (r"checks/.+/score_mean",), "mean over all rows that it checked"),
        Picture("Failures", (r"(reward|environment)/failures/.+",), "checks and trajectories that failed, by kind"),
    ),
    "What it writes": (
        Picture("Response length", ("response/length_mean",), "tokens"),
        Picture("Cut off at the length limit", ("response/truncated_fraction",), "share of responses"),
        Picture("Groups without a signal", (r"groups/(all_.+|no_signal)_fraction",), "share of prompts"),
    ),
    "How training goes": (
        Picture("Entropy", ("actor/entropy",), "nats per token"),
        Picture("Log-probability of trained tokens", ("actor/log_prob_mean",), "mean over action tokens"),
        Picture("KL from the old policy", ("actor/kl_old",), "nats per token"),
        Picture("Clipped tokens", ("actor/clip_fraction",), "share of action tokens"),
        Picture("Gradient norm", ("actor/grad_norm",), "before clipping"),
        Picture("Actor loss", ("loss/actor",), "on-policy its value is near 0, its gradient is not"),
    ),
    "How it runs": (
        Picture("Seconds per stage", (r"time/(?!step$).+",), "stacked", True),
        Picture("Seconds per step", ("time/step",), "wall clock, everything included"),
        Picture("Throughput", ("throughput/tokens_per_second",), "prompt and response tokens per second"),
        Picture("Utilisation", (r"utilisation/.+",), "share of the device's operations or bytes per second"),
        Picture("Memory", (r"memory/.+",), "bytes at the peak of each stage, of the process that takes most"),
        Picture("Weight updates", (r"weights/.+/update_seconds",), "seconds until new weights generate"),
        Picture("Tokens", ("tokens/generated", "tokens/trained"), "per step"),
        Picture("Engine against trainer", ("train/rollout_log_prob_gap",), "in the log-probs of the same tokens"),
        Picture("Staleness", ("staleness/max",), "versions between sampling and training"),
    ),
}


@dataclass(frozen=True)
class Series:
    """A curve: one value per step. None is a gap."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]

    @property
    def numbers(self) -> list[float]:
        return [value for value in self.values if value is not None]


class Chart(NamedTuple):
    """A chart as the page shows it, with the traces that plotly.js draws."""

    title: str
    about: str
    curves: list[dict[str, str]]
    """The entries of the legend: name, colour and last value."""
    traces: list[dict[str, Any]]
    stacked: bool


@dataclass(frozen=True)
class Sample:
    """One recorded row as text and numbers."""

    step: int
    prompt: str
    response: str
    score: float | None
    correct: bool | None
    finish_reason: str | None
    answer: str | None = None
    images: list[str] = field(default_factory=list)
    """The names of the images in the row."""


class SampleGroup(NamedTuple):
    """Samples shown together: the samples of one prompt, or, if the prompt is None, samples with their own prompts."""

    title: str
    samples: list[Sample]
    prompt: str | None = None


@functools.cache
def plotly_script() -> bytes:
    """Return the 5 MB of plotly.js. Raises UserError without plotly."""
    try:
        from plotly.offline import get_plotlyjs  # imported here: a run without plotly skips its report
    except ImportError as error:
        raise UserError(f"report.html needs plotly ({first_line(error)}); write `pip install plotly`") from error
    return get_plotlyjs().encode()


def write_report(run: Path) -> Path:
    """Write `run`/report.html from the run's metrics and recordings. Raises UserError without metrics or plotly."""
    script, lines = plotly_script(), read_metrics(run)
    points: dict[str, list[tuple[int, float | None]]] = {}
    for line in lines:
        for key, value in line.items():
            # Leading nulls are steps that cannot have a value (an evaluation before training), not gaps.
            if key not in ("step", "version") and (value is not None or key in points):
                points.setdefault(key, []).append((line["step"], value))
    curves = {key: Series(key, *map(tuple, zip(*samples, strict=True))) for key, samples in points.items()}
    series = {
        picture: [
            series_of
            for name, series_of in curves.items()
            if any(re.fullmatch(pattern, name) for pattern in picture.keys)
        ]
        for pictures in SECTIONS.values()
        for picture in pictures
    }
    shown_names = {series_of.name for samples in series.values() for series_of in samples}
    summary = "No step has been written yet."
    if lines:
        seconds, steps = sum(line.get("time/step") or 0.0 for line in lines), lines[-1]["step"]
        summary = f"{steps:,} step{'' if steps == 1 else 's'}, {spell_seconds(seconds)} of training."
    if len(lines) >= SMOOTH_FROM:
        summary += " Strong curves are means over neighbouring steps, faint ones the steps themselves."
    path, config = run / "report.html", run / "config.yaml"
    # A random word, which no response contains. The script replaces it in the page's bytes: a template would copy its 5
    # MB four times.
    token = secrets.token_hex(16)
    html = TEMPLATES.get_template("report.html").render(
        name=run.resolve().name,
        summary=summary,
        tiles=headlines(curves, series[EVALUATION]),
        sections=[
            (
                title,
                [
                    chart(series_of.title, series[series_of], series_of.about, series_of.stacked)
                    for series_of in pictures
                    if series[series_of]
                ],
            )
            for title, pictures in SECTIONS.items()
        ],
        samples=sample_groups(run),
        longest=SHOWN_CHARACTERS,
        thumbnail=thumbnails(config),
        other=[chart(name, [series_of]) for name, series_of in curves.items() if name not in shown_names],
        configuration=config.read_text(encoding="utf-8") if config.is_file() else "",
        plotly=token,
    )
    with whole_file(path) as unfinished:
        unfinished.write_bytes(html.encode().replace(token.encode(), script, 1))
    return path


def chart(title: str, series: Sequence[Series], about: str = "", stacked: bool = False) -> Chart:
    """Return a chart of several series as curves or `stacked` bars; a point of a long series is the mean over equally
    many steps.
    """
    if len(series) > 1 and len({line.name.partition("/")[0] for line in series}) == 1:
        series = [replace(line, name=line.name.partition("/")[2]) for line in series]
    curves, traces, longest_mean = list[dict[str, str]](), list[dict[str, Any]](), 1
    for number, line in enumerate(series):
        paint, steps, values = PALETTE[number % len(PALETTE)], line.steps, line.values
        curves.append({"name": line.name, "colour": paint, "last": spell(line.numbers[-1])})
        size = math.ceil(len(steps) / (MOST_BARS if stacked else MOST_POINTS))
        if size > 1:
            longest_mean = max(longest_mean, size)
            stretches = [slice(i, i + size) for i in range(0, len(steps), size)]
            steps = tuple(steps[s][len(steps[s]) // 2] for s in stretches)
            values = tuple(mean(values[s]) for s in stretches)
        trace: dict[str, Any] = {"x": steps, "y": values, "name": line.name}
        curve = {**trace, "line": {"color": paint}, "mode": "lines"}
        shown = sum(value is not None for value in values)
        if stacked:
            traces.append({**trace, "type": "bar", "marker": {"color": paint}})
        elif shown < SMOOTH_FROM:
            # Few points get dots.
            traces.append(curve | {"mode": "lines+markers" if shown <= DOTS_UP_TO else "lines"})
        else:
            # Many points are drawn faintly behind their moving mean.
            reach = max(2, len(values) // 30)
            smooth = [
                None if value is None else mean(values[max(0, i - reach) : i + reach + 1])
                for i, value in enumerate(values)
            ]
            traces += [curve | {"opacity": 0.32}, curve | {"y": smooth, "hoverinfo": "skip"}]
    note = ", ".join(filter(None, [about, f"means of {longest_mean} steps" if longest_mean > 1 else ""]))
    return Chart(title, note, curves, traces, stacked)


def mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


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


def headlines(curves: Mapping[str, Series], evaluations: Sequence[Series]) -> list[dict[str, str]]:
    """Return a tile `0.31 → 0.88`, means over first and last steps, for each headline number, and a tile for the tokens
    trained.
    """
    tile_series = [(curve.name.removeprefix("eval/").replace("/", " "), curve, 1) for curve in evaluations]
    tile_series += [(label, curves[name], HEADLINE_STEPS) for label, name in HEADLINES if name in curves]
    tiles = []
    for label, series, steps in tile_series:
        numbers = series.numbers
        if len(numbers) == 1:
            value, where = spell(numbers[0]), f"at step {series.steps[0]}"
        else:
            count = max(1, min(steps, len(numbers) // 2))
            value = " → ".join(spell(mean(part) or 0.0) for part in (numbers[:count], numbers[-count:]))
            where = f"step {series.steps[0]} to {series.steps[-1]}" if count == 1 else f"first and last {count} steps"
        tiles.append({"label": label, "value": value, "detail": where})
    if "tokens/trained" in curves:
        speed = curves.get("throughput/tokens_per_second")
        note = f"{spell(mean(speed.numbers) or 0.0)} tokens/s on average" if speed else ""
        total = spell(sum(curves["tokens/trained"].numbers))
        tiles.append({"label": "Tokens trained", "value": total, "detail": note})
    return tiles


def read_samples(run: Path, step: int, evaluation: str | None = None) -> list[Sample]:
    """Read the recorded rows of a step, of the first machines if there are many.

    The score is the verifier's if present, otherwise the reward.
    """
    samples = []
    for row in read_texts(rollout_path(run, step, evaluation), COLUMNS, MOST_FILES):
        correct, reason = row.get("correct"), row.get("finish_reason")
        named = None if reason is None else FinishReason(reason).name.lower()
        answer = json.loads(row.get("metadata") or "{}").get("answer")
        answer_text = None if answer is None else whole_text(answer) if isinstance(answer, str) else json.dumps(answer)
        right, score = None if correct is None else bool(correct), row.get("score", row.get("reward"))
        images = [name for name, _, _ in json.loads(row.get("images") or "[]")]
        samples.append(Sample(step, row[PROMPT_TEXT], row[RESPONSE_TEXT], score, right, named, answer_text, images))
    return samples


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` steps, evenly spread, including the first and the last."""
    return [steps[i] for i in np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)]


def best_and_worst(samples: Sequence[Sample]) -> list[Sample]:
    """Return the rows with the highest and the lowest score; only one row if all scores are equal or missing."""
    if not samples:
        return []
    scores = [float("-inf") if sample.score is None else sample.score for sample in samples]
    return [samples[i] for i in dict.fromkeys((scores.index(max(scores)), scores.index(min(scores))))]


def samples_of_step(run: Path, step: int) -> list[dict[str, Any]]:
    """Return a step's samples for trackers: the best and worst training row, and first prompts of evaluated sets."""
    samples: list[tuple[str, Sample]] = []
    if step in recorded_steps(run):
        samples += [("training", sample) for sample in best_and_worst(read_samples(run, step))]
    for name in recorded_evaluations(run):
        if step in recorded_steps(run, name):
            samples += [(name, sample) for sample in read_samples(run, step, name)[:PROMPTS_PER_SET]]
    return [{"step": step, "set": name, **asdict(sample)} for name, sample in samples]


def sample_groups(run: Path) -> list[SampleGroup]:
    """Return the first prompts of each evaluation set with a response of several steps, and the best and worst training
    rows.
    """
    groups: list[SampleGroup] = []
    for name in recorded_evaluations(run):
        chosen: dict[tuple[str, tuple[str, ...]], list[Sample]] = {}
        for step in spread(recorded_steps(run, name), MOST_STEPS):
            by_prompt: dict[tuple[str, tuple[str, ...]], Sample] = {}
            for sample in read_samples(run, step, name):
                by_prompt.setdefault((sample.prompt, tuple(sample.images)), sample)
            chosen = chosen or {prompt: [] for prompt in list(by_prompt)[:PROMPTS_PER_SET]}
            for prompt in chosen.keys() & by_prompt.keys():
                chosen[prompt].append(by_prompt[prompt])
        title = f"{name}: the same prompt over time"
        groups += [SampleGroup(title, samples, prompt) for (prompt, _), samples in chosen.items()]
    for step in spread(recorded_steps(run), MOST_STEPS):
        if rows := best_and_worst(read_samples(run, step)):
            groups.append(SampleGroup(f"Training, step {step}", rows))
    return groups

"""Curricula: choose a source's next prompts by the measured success on its prompts.

iteration k ends ──measure──▶ share of right rows of each group ──▶ moving averages of each unit
batch k + 1 + max_staleness opens ──begin──▶ function(Measured) ──▶ weight of each unit ──▶ the batch's examples

A unit is an example or, with `by`, the examples of a source that share the value of a field. A batch uses the
measurements up to a fixed iteration before it, and its draws depend on the seed, the source, the batch and their number
in it. Every runtime and a resumed run therefore admit the same prompts. The share of each source stays that of its
weight.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from braidrl.algorithms.random import hashed, uniform
from braidrl.config import Config, CurriculumConfig
from braidrl.data.fields import ABSENT, find
from braidrl.data.prompts import LoadedSource
from braidrl.data.rows import FinishReason, Rows
from braidrl.deferred import torch
from braidrl.errors import UserError, users_errors
from braidrl.importing import PluginRegistry

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, spread evenly for any count of them."""
MOST_SHOWN = 20
"""The largest number of units that have metrics of their own."""


class Measured(NamedTuple):
    """Measurements on the units of one source."""

    rate: np.ndarray
    """(U,) float64, moving average of the share of right rows; NaN for a unit that was not drawn yet."""
    progress: np.ndarray
    """(U,) float64, distance between a fast and a slow moving average: how fast the rate changes."""
    groups: np.ndarray
    """(U,) int64, number of measured groups."""


def bands(measured: Measured, *, low: float = 0.2, high: float = 0.8, elsewhere: float = 0.05) -> np.ndarray:
    """Return weight 1 for pass rates from `low` to `high` and for unmeasured units, `elsewhere` for other rates."""
    inside = np.isnan(measured.rate) | ((measured.rate >= low) & (measured.rate <= high))
    return np.where(inside, 1.0, elsewhere)


def gaussian(measured: Measured, *, target: float = 0.5, width: float = 0.2, least: float = 0.02) -> np.ndarray:
    """Return exp(-(rate - target)² / 2 width²), at least `least`; an unmeasured unit is at the target."""
    rate = np.where(np.isnan(measured.rate), target, measured.rate)
    return np.maximum(np.exp(-0.5 * ((rate - target) / width) ** 2), least)


def progress(measured: Measured, *, least: float = 0.1) -> np.ndarray:
    """Return the learning progress relative to the largest, at least `least`; 1 for unmeasured units (Matiisen et al.
    2017, teacher-student curriculum).
    """
    largest = measured.progress.max(initial=0.0)
    relative = measured.progress / largest if largest > 0 else np.ones(len(measured.progress))
    return np.where(np.isnan(measured.rate), 1.0, np.maximum(relative, least))


CURRICULA = PluginRegistry(
    "curriculum", {function.__name__: f"{__name__}:{function.__name__}" for function in (bands, gaussian, progress)}
)


class Units(NamedTuple):
    """The units of one source: `names` (U,) and the unit of each example, (N,) int64; without names each is a unit."""

    names: tuple[str, ...]
    of_example: np.ndarray


def units_of(config: Config, sources: Sequence[LoadedSource]) -> list[Units]:
    """Return the units of each source; without a curriculum each example is a unit, and no data is read.

    Raises UserError if an example lacks the field of `by`.
    """
    curriculum = config.data.curriculum
    if curriculum is None or curriculum.by is None:
        return [Units((), np.arange(len(source) if curriculum else 0)) for source in sources]
    units = []
    for source in sources:
        texts = []
        for example in source:
            value = find(example.metadata, curriculum.by)
            if value is ABSENT or value is None:
                raise UserError(
                    f"data.curriculum.by={curriculum.by}: line {example.line} of {source.path} has no such field; name "
                    "a field that every example has, or remove `by`"
                )
            texts.append(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        names, of_example = np.unique(np.array(texts), return_inverse=True)
        units.append(Units(tuple(names.tolist()), of_example.astype(np.int64)))
    return units


def curriculum_of(config: Config, units: Sequence[Units]) -> "Curriculum | None":
    """Return the curriculum of a run's training sources, or None. Raises UserError for an unknown one or setting."""
    if config.data.curriculum is None or not units:
        return None
    return Curriculum(config.data.curriculum, units, config.seed, 1 + config.trainer.max_staleness)


def check_curriculum(config: Config, written: Collection[str]) -> None:
    """Raise UserError for an unknown curriculum, a wrong setting, or a flow that writes no measured columns."""
    if config.data.curriculum is None:
        return
    if not {"score", "finish_reason"} <= set(written):
        raise UserError("data.curriculum measures the scores of generated responses, and this flow has none; remove it")
    Curriculum(config.data.curriculum, [Units((), np.arange(2))], config.seed, 1).begin(1)


class DrawnExample(NamedTuple):
    """The example of an admission number, and the iteration for which it was drawn."""

    source: int
    example: int
    iteration: int


Record = tuple[int, int, float]
"""Source, unit and share of right rows of a measured group."""


class Curriculum:
    """The state of a run's curriculum: the averages, recent measurements, and the draws without measurements."""

    def __init__(self, config: CurriculumConfig, units: Sequence[Units], seed: int, lag: int) -> None:
        """Start without measurements; a batch uses those up to `lag` iterations before it.

        Raises UserError for an unknown curriculum or setting.
        """
        self.config, self.units, self.seed, self.lag = config, list(units), seed, lag
        self.function: Callable[..., Any] = CURRICULA.find(config.name)
        CURRICULA.check_settings(config.name, config.params)
        counts = [len(source.names) or len(source.of_example) for source in units]
        self.averages = [np.full((count, 2), np.nan) for count in counts]
        """Fast and slow moving average of each unit, (U, 2), up to the last iteration that no batch goes behind."""
        self.groups = [np.zeros(count, dtype=np.int64) for count in counts]
        self.recent: dict[int, list[Record]] = {}
        """Measurements of the iterations after those in the averages."""
        self.measured = 0
        """The last measured iteration."""
        self.drawn: dict[int, DrawnExample] = {}
        self.members = [np.argsort(source.of_example, kind="stable") for source in units]
        """The examples of each source, unit after unit."""
        self.edges = [
            np.searchsorted(np.sort(source.of_example), np.arange(count + 1))
            for source, count in zip(units, counts, strict=True)
        ]

    def is_ready(self, iteration: int) -> bool:
        """Return True if all measurements exist on which the batch of an iteration depends."""
        return self.measured >= iteration - self.lag

    def begin(self, iteration: int) -> None:
        """Start the draws of a batch."""
        sources = range(len(self.units))
        self.iteration, self.counts, self.of_unit = iteration, [0 for _ in sources], [Counter[int]() for _ in sources]
        measured_units = [self.measured_until(source, iteration - self.lag) for source in sources]
        self.cumulated = [np.cumsum(self.weights_of(measured)) for measured in measured_units]
        self.phases = [float(uniform("curriculum", self.seed, source, iteration)) for source in sources]

    def weights_of(self, measured: Measured) -> np.ndarray:
        """Return the weight of each unit, (U,) float64. Raises UserError for invalid weights."""
        with users_errors(f"curriculum {self.config.name}", self.function):
            weights = np.asarray(self.function(measured, **self.config.params), dtype=np.float64)
        if weights.shape != measured.rate.shape or not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise UserError(
                f"curriculum {self.config.name} returned weights {weights.shape} for {len(measured.rate)} units, or one"
                " that is negative or not finite; return a number from 0 for each unit"
            )
        if not weights.sum():
            raise UserError(f"curriculum {self.config.name} gives every unit the weight 0; give at least one more")
        return weights

    def measured_until(self, source: int, iteration: int) -> Measured:
        averages, groups = self.averages[source].copy(), self.groups[source].copy()
        for k in sorted(earlier for earlier in self.recent if earlier <= iteration):
            self.average(averages, groups, [record for record in self.recent[k] if record[0] == source])
        return Measured(averages[:, 0], np.nan_to_num(abs(averages[:, 0] - averages[:, 1])), groups)

    def average(self, averages: np.ndarray, groups: np.ndarray, records: Sequence[Record]) -> None:
        """Add measurements to the moving averages of a source; a unit's average starts at its first measurement."""
        steps = np.array([self.config.step, self.config.step / 4])
        for _, unit, rate in records:
            before = averages[unit]
            averages[unit] = rate if np.isnan(before[0]) else before + steps * (rate - before)
            groups[unit] += 1

    def draw(self, number: int, source: int) -> DrawnExample:
        """Draw the next example of a source for an admission number.

        The k-th draw of a batch takes the unit at frac(phase + k · golden ratio) of the cumulated weights: units come
        in proportion to their weights for any number of draws. Examples of a unit come in a seeded order.
        """
        position, cumulated = (self.phases[source] + self.counts[source] * GOLDEN) % 1.0, self.cumulated[source]
        unit = int(np.searchsorted(cumulated, position * cumulated[-1], side="right"))
        first, end = self.edges[source][unit : unit + 2].tolist()
        size, start = end - first, int(hashed("curriculum", self.seed, source, self.iteration, unit))
        # A step without a common divisor with the size visits every example before it repeats one.
        stride = next(step for step in range(int(size * GOLDEN) + 1, 2 * size + 2) if math.gcd(step, size) == 1)
        index = int(self.members[source][first + (start + self.of_unit[source][unit] * stride) % size])
        self.counts[source] += 1
        self.of_unit[source][unit] += 1
        self.drawn[number] = example = DrawnExample(source, index, self.iteration)
        return example

    def measure(self, iteration: int, index: Rows) -> dict[str, float]:
        """Record the share of right rows of each group of a finished iteration; return the metrics of the units.

        Rows that failed do not count. A row without `correct` counts by its score, from 0 to 1.
        """
        success = index["score"].double().clamp(0.0, 1.0)
        if "correct" in index:
            success = torch.where(index["correct"].isnan(), success, index["correct"].double())
        valid = success.isfinite() & (index["finish_reason"] != FinishReason.ERROR)
        rows: dict[int, list[float]] = {}
        for group, value, counts in zip(index["group"].tolist(), success.tolist(), valid.tolist(), strict=True):
            if counts:
                rows.setdefault(group, []).append(value)
        drawn = [(self.drawn.pop(group), sum(v) / len(v)) for group, v in sorted(rows.items()) if group in self.drawn]
        self.recent[iteration] = [
            (d.source, int(self.units[d.source].of_example[d.example]), rate) for d, rate in drawn
        ]
        self.measured = iteration
        # Every later batch uses these measurements; older draws that have none were dropped.
        for old in sorted(k for k in self.recent if k <= iteration + 1 - self.lag):
            for source, (averages, groups) in enumerate(zip(self.averages, self.groups, strict=True)):
                self.average(averages, groups, [record for record in self.recent[old] if record[0] == source])
            del self.recent[old]
        self.drawn = {number: d for number, d in self.drawn.items() if d.iteration >= iteration - self.lag}
        return self.metrics(drawn)

    def metrics(self, drawn: Sequence[tuple[DrawnExample, float]]) -> dict[str, float]:
        """Return, for each named unit, its share of an iteration's groups and its pass rate in them."""
        shown = {}
        for source, units in enumerate(self.units):
            of_source = [(units.of_example[d.example], rate) for d, rate in drawn if d.source == source]
            for number, name in enumerate(units.names if len(units.names) <= MOST_SHOWN else ()):
                rates = [rate for unit, rate in of_source if unit == number]
                label = f"{name}" if len(self.units) == 1 else f"{source}/{name}"
                shown[f"curriculum/{label}/share"] = len(rates) / max(len(of_source), 1)
                if rates:
                    shown[f"curriculum/{label}/pass_rate"] = sum(rates) / len(rates)
        return shown

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        averages = [
            [[int(unit), *averages_of_source[unit].tolist(), int(groups[unit])] for unit in np.flatnonzero(groups)]
            for averages_of_source, groups in zip(self.averages, self.groups, strict=True)
        ]
        recent = [[iteration, records] for iteration, records in sorted(self.recent.items())]
        drawn = [[number, *example] for number, example in sorted(self.drawn.items())]
        return {"averages": averages, "recent": recent, "drawn": drawn, "measured": self.measured}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        for source, records_of_units in enumerate(state["averages"]):
            self.averages[source].fill(np.nan)
            self.groups[source].fill(0)
            for unit, fast, slow, groups in records_of_units:
                self.averages[source][unit] = fast, slow
                self.groups[source][unit] = groups
        self.recent = {iteration: [(s, u, r) for s, u, r in records] for iteration, records in state["recent"]}
        self.drawn = {number: DrawnExample(*example) for number, *example in state["drawn"]}
        self.measured = state["measured"]

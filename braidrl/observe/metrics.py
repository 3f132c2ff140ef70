"""`metrics.jsonl`: one object per step, always with the same keys. The run's trackers get the same numbers.

workers ──Sums──▶ merge ──means──▶ MetricsWriter ──▶ metrics.jsonl, trackers
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from braidrl.deferred import Tensor, torch
from braidrl.errors import UserError, shown
from braidrl.observe.trackers import TrackedRun, Trackers
from braidrl.parsing import parse_json

T = TypeVar("T")
FILE_NAME = "metrics.jsonl"
REQUIRED_KEYS = (
    "step",
    "version",
    "loss/actor",
    "reward/mean",
    "score/mean",
    "response/length_mean",
    "response/truncated_fraction",
    "groups/all_correct_fraction",
    "groups/all_wrong_fraction",
    "actor/entropy",
    "actor/log_prob_mean",
    "actor/kl_old",
    "actor/clip_fraction",
    "actor/grad_norm",
    "train/rollout_log_prob_gap",
    "tokens/generated",
    "tokens/trained",
    "time/step",
    "throughput/tokens_per_second",
    "staleness/max",
)
"""Keys of every line. `time/<stage>` and, on evaluation steps, `eval/<set>/avg@k` are added."""
MEASURED = (
    "time/",
    "throughput/",
    "utilisation/",
    "memory/",
    "weights/",
    "streaming/",
    "checks/",
    "speculation/",
    "images/",
    "ranks/",
)
"""Prefixes of metrics that depend on the clock or the machine; they differ between two equal runs."""


def open_lines(path: Path) -> BinaryIO:
    """Open a JSON lines file to append to.

    An incomplete last line, left only by a kill, is cut off; readers ignore it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    file.truncate(path.read_bytes().rfind(b"\n") + 1)
    return file


def append_line(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """Append an object as a line; returns when the operating system has it."""
    file.write((json.dumps(record, allow_nan=False) + "\n").encode())
    file.flush()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file moves to `path` if the block ends without error, otherwise it is discarded."""
    # Processes of several machines, which may have the same number, write to one file.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_lines(path: Path, form: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read all complete lines of a file, each an object that `form` turns into a value.

    Raises UserError when the file is missing, or with the number of a line that is not JSON or for which `form` raises
    ValueError.
    """
    if not path.is_file():
        raise UserError(f"no file {path}: is {path.parent} the folder of a run?")
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; remove the line to read the rest")
        try:
            records.append(form(record))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line to read the rest") from None
    return records


def numbers_of_step(record: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a step. Raises ValueError for a step that is no whole number, or a metric that is none."""
    if type(record.get("step")) is not int:
        raise ValueError(f"step is {shown(record.get('step'))}, and not a whole number")
    for name, value in record.items():
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{shown(name)} is {shown(value)}, and metrics are numbers")
    return record


class MetricsWriter:
    """Writes each step's metrics once, in the order of steps."""

    def __init__(self, folder: Path, resume_step: int | None = None, trackers: Trackers | None = None) -> None:
        """Start metrics.jsonl, or resume it after the checkpoint's step `resume_step`.

        Raises UserError if metrics exist without it.
        """
        path = folder / FILE_NAME
        if resume_step is None and path.exists() and path.stat().st_size:
            raise UserError(f"{folder} holds the metrics of an earlier run; go on by --resume, or choose another name")
        records = read_lines(path, numbers_of_step) if path.exists() else []
        lines = [line for line in records if line["step"] <= (resume_step or 0)]
        if path.exists():
            # A kill during this leaves the old file intact.
            with whole_file(path) as unfinished:
                unfinished.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self.lacking = sorted(set(range(1, (resume_step or 0) + 1)) - {line["step"] for line in lines})
        """Steps before the checkpoint that have no line."""
        self.last: Mapping[str, Any] = lines[-1] if lines else {"step": -1}
        self._file = open_lines(path)
        self.trackers = trackers or Trackers((), TrackedRun(folder), print)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step; NaN and infinities become null. Raises ValueError for missing keys, invalid values, and an
        earlier step.
        """
        missing = [key for key in REQUIRED_KEYS if key not in metrics]
        if missing:
            raise ValueError(f"metrics of step {metrics.get('step')} lack {', '.join(missing)}")
        line: dict[str, Any] = {}
        for key, value in metrics.items():
            try:
                if value is not None and not isinstance(value, int):
                    value = number if math.isfinite(number := float(value)) else None
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"metric {key} must be a number, got {value!r}") from None
            line[key] = value
        step = line["step"]
        if not isinstance(step, int) or step <= self.last["step"]:
            raise ValueError(f"step {step} does not follow step {self.last['step']}, the last one written")
        append_line(self._file, line)
        self.last = line
        numbers = {key: value for key, value in line.items() if value is not None and key != "step"}
        self.trackers.write(step, numbers)

    def close(self) -> None:
        self._file.close()
        self.trackers.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, given the file or its run folder. An incomplete last line is ignored."""
    path = Path(path)
    return read_lines(path / FILE_NAME if path.is_dir() else path, numbers_of_step)


FAILURE = "failure: "
"""Prefix of a failure's message, the name under which it is counted: text travels together with sums."""


class Sums:
    """Sums and counts by name, added over micro-batches and workers and then divided into means; also maxima."""

    def __init__(self, pairs: Mapping[str, Sequence[float]] | None = None) -> None:
        """Build from the result of `pairs()`."""
        self._pairs = {name: (float(total), float(count)) for name, (total, count) in (pairs or {}).items()}

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1) -> None:
        """Add to a mean the sum of `count` values. A name that ends in `_max` keeps the largest value instead."""
        if name.endswith("_max"):
            largest, _ = self._pairs.get(name, (float("-inf"), 1.0))
            self._pairs[name] = (max(largest, float(total)), 1.0)
        else:
            old_total, old_count = self._pairs.get(name, (0.0, 0.0))
            self._pairs[name] = (old_total + float(total), old_count + float(count))

    def add_per_token(self, role: str, metrics: Mapping[str, Tensor], counted: bool = True) -> None:
        """Add per-token numbers, tensors (A,) by name, under a role's name; without `counted` another process counts
        the tokens.

        A name that ends in `_max` is reduced by its maximum.
        """
        reduced = [values.max() if name.endswith("_max") else values.sum() for name, values in metrics.items()]
        # One transfer for all: each separate read makes the host wait for the device.
        numbers = torch.stack(reduced).tolist() if reduced else []
        for (name, values), number in zip(metrics.items(), numbers, strict=True):
            self.add(f"{role}/{name}", number, len(values) if counted else 0)

    def merge(self, *others: "Sums") -> "Sums":
        """Add the sums of other micro-batches or workers, in this order, and return this object."""
        for sums in others:
            for name, (total, count) in sums._pairs.items():
                self.add(name, total, count)
        return self

    def pairs(self) -> dict[str, tuple[float, float]]:
        """Return name to (sum, count) as plain numbers, ready to send."""
        return dict(self._pairs)

    def means(self) -> dict[str, float]:
        """Return the mean by name; NaN if the count is zero."""
        return {name: total / count if count else float("nan") for name, (total, count) in self._pairs.items()}


Pairs = Mapping[str, Sequence[float]]


def merged(low: Pairs, high: Pairs) -> dict[str, tuple[float, float]]:
    """Add the sums of two sets of workers, in the form of `Sums.pairs`."""
    return Sums(low).merge(Sums(high)).pairs()

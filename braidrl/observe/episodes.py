"""Recorded episodes: an index of a run's rows to filter, and one row as its turns. It needs no torch.

rollouts/*.parquet ──small columns──▶ RowIndex ──Filter──▶ rows ──one row group──▶ Episode: segments of tokens

Opening a run reads only columns with one number per row; one episode reads the row group of its row.
"""

import base64
import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from braidrl.config import ImagesConfig
from braidrl.data.identity import FinishReason
from braidrl.data.images import ImageStore
from braidrl.errors import UserError, suggest
from braidrl.observe.rollouts import (
    PROMPT_TEXT,
    RESPONSE_TEXT,
    SCHEMA_KEY,
    check_recording,
    parts_of,
    recorded_evaluations,
    recorded_steps,
    rollout_path,
)
from braidrl.parsing import parse_yaml

NUMBERS = ("source", "group", "sample", "reward", "score", "correct", "finish_reason", "length", "action_tokens")
"""Columns of the index, as far as a recording has them."""
THUMBNAIL = 96
"""Greatest width and height of an image on the page, in pixels."""
PER_TURN = "turn_"
"""Prefix of the columns with one value per turn."""
PAYLOAD = ("tokens", "action_mask", "sequence_lengths", "prompt", "metadata", "images", PROMPT_TEXT, RESPONSE_TEXT)
MASK = "action_mask"


@dataclass(frozen=True)
class Filter:
    """Rows to show; None does not filter."""

    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ended: str | None = None
    """A finish reason: stop, length, error or repeat."""
    sort: str = ""
    """A column of the index, ascending; with a leading minus descending. Empty keeps the order of the run."""


class RowIndex:
    """The rows of a run's training steps, or an evaluation set: their numbers as arrays (B,), and their locations."""

    def __init__(self, run: Path, evaluation: str | None = None) -> None:
        """Read the index columns of all steps. Raises UserError if nothing was recorded."""
        steps = recorded_steps(run, evaluation)
        if not steps:
            sets = recorded_evaluations(run)
            of = f" of the set {evaluation!r}. {suggest(evaluation, sets)}" if evaluation else ""
            raise UserError(f"{run} has no recorded rollouts{of}; give the folder of a run that recorded some")
        self.run, self.files = run, list[Path]()
        tables, parts = [], []
        for step in steps:
            path = rollout_path(run, step, evaluation)
            check_recording(path)
            for file in parts_of(path):
                table = pq.read_table(file, columns=[n for n in NUMBERS if n in pq.read_schema(file).names])
                tables.append(table)
                parts.append((step, len(self.files), len(table)))
                self.files.append(file)
        table_of_run = pa.concat_tables(tables, promote_options="default")
        names = [name for name in NUMBERS if name in table_of_run.column_names]
        self.numbers = {name: table_of_run.column(name).to_numpy() for name in names}
        self.numbers["step"] = np.repeat([step for step, _, _ in parts], [count for _, _, count in parts])
        self.file = np.repeat([number for _, number, _ in parts], [count for _, _, count in parts])
        self.row = np.concatenate([np.arange(count) for _, _, count in parts])

    def __len__(self) -> int:
        return len(self.row)

    @property
    def reward_name(self) -> str | None:
        return next((name for name in ("reward", "score") if name in self.numbers), None)

    def choose(self, row_filter: Filter) -> np.ndarray:
        """Return the numbers of the rows that pass a filter, in its order. Raises UserError for an unknown column."""
        keep = np.ones(len(self), dtype=bool)
        rewards = self._needed(self.reward_name or "reward", row_filter.min_reward, row_filter.max_reward)
        lengths = self._needed("action_tokens", row_filter.min_tokens, row_filter.max_tokens)
        for values, low, high in (
            (rewards, row_filter.min_reward, row_filter.max_reward),
            (lengths, row_filter.min_tokens, row_filter.max_tokens),
        ):
            keep &= True if low is None else values >= low
            keep &= True if high is None else values <= high
        if row_filter.step is not None:
            keep &= self.numbers["step"] == row_filter.step
        if row_filter.ended is not None:
            names = {reason.name.lower(): int(reason) for reason in FinishReason}
            if row_filter.ended not in names:
                raise UserError(f"no row ends by {row_filter.ended!r}. {suggest(row_filter.ended, names)}")
            keep &= self._needed("finish_reason", 0, None) == names[row_filter.ended]
        rows = np.flatnonzero(keep)
        if not row_filter.sort:
            return rows
        values = self._needed(row_filter.sort.removeprefix("-"), 0, None)[rows].astype(np.float64)
        return rows[np.argsort(-values if row_filter.sort.startswith("-") else values, kind="stable")]

    def _needed(self, name: str, *limits: float | None) -> np.ndarray:
        if name not in self.numbers:
            if any(limit is not None for limit in limits):
                raise UserError(f"these rollouts have no column {name}. {suggest(name, self.numbers)}")
            return np.zeros(len(self))
        return self.numbers[name]

    def summary(self, row: int) -> dict[str, Any]:
        """Return a row's numbers by name, with its finish reason in words."""
        shown = {name: plain(values[row]) for name, values in self.numbers.items()}
        if shown.get("finish_reason") is not None:
            shown["finish_reason"] = FinishReason(shown["finish_reason"]).name.lower()
        return {"row": int(row), **shown}

    def find(self, step: int, group: int, sample: int) -> int:
        """Return the number of a row. Raises UserError if there is none."""
        identity = {"step": step, "group": group, "sample": sample}
        match = np.flatnonzero(np.all([self.numbers[name] == value for name, value in identity.items()], axis=0))
        if not len(match):
            raise UserError(f"no row {step}.{group}.{sample} was recorded; `braid rollouts {self.run}` lists them")
        return int(match[0])

    def record(self, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all columns of a row, and the description of their types; only its row group is decoded."""
        file, left = pq.ParquetFile(self.files[self.file[row]]), int(self.row[row])
        described = json.loads(file.schema_arrow.metadata[SCHEMA_KEY])
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            if left < count:
                return file.read_row_group(number).slice(left, 1).to_pylist()[0], described
            left -= count
        raise UserError(f"{self.files[self.file[row]]} has changed since it was opened; open it again")


def plain(value: Any) -> Any:
    """Return a numpy number as a Python number; None for NaN and infinity, which JSON lacks."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tokenizer_of(run: Path) -> Tokenizer | None:
    """Return the tokenizer of a run's model, or of its newest checkpoint; None if neither exists any more."""
    config = run / "config.yaml"
    model = parse_yaml(config.read_text(), str(config)).get("model") if config.is_file() else None
    folders = [Path(str(model)).expanduser()] if model else []
    folders += sorted((run / "checkpoints").glob("step-*/*"), reverse=True)
    file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return None if file is None else Tokenizer.from_file(str(file))


def thumbnails(config: Path) -> Callable[[str], str]:
    """Return a function from an image's name to a small PNG as a data: URI; empty text for a missing image."""
    settings = parse_yaml(config.read_text(encoding="utf-8"), str(config)) if config.is_file() else {}
    images = ImagesConfig(**((settings.get("data") or {}).get("images") or {}))
    store = ImageStore.of(images)

    @functools.cache
    def thumbnail(name: str) -> str:
        try:
            image = store.open(name)
        except UserError:  # a run may be viewed on a machine without its images
            return ""
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        content = io.BytesIO()
        image.save(content, "PNG")
        return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()

    return thumbnail


def episode(record: Mapping[str, Any], described: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a recorded row as JSON: its segments in order, numbers, metadata, and the names of other columns.

    A segment is a run of tokens of one kind: `context` (the prompt, or the start of a further sequence), `model` (a
    turn) or `observation`. Its tokens have the values of every column with a number per sampled token; the tokens of an
    image are one, with its name. The segments of further policies, whose columns are in namespaces, follow with the
    name of their `policy`.
    """
    numbers = {n: plain(record[n]) for n, about in described.items() if about["kind"] == "index" and not about["shape"]}
    for name in [name for name in numbers if name.rpartition(".")[2] == "finish_reason"]:
        if numbers[name] is not None:
            numbers[name] = FinishReason(numbers[name]).name.lower()
    segments, named = list[dict[str, Any]](), {*numbers, *PAYLOAD}
    others = tuple(sorted(name.removesuffix("tokens") for name in described if name.endswith(".tokens")))
    for prefix in ("", *others):
        of_policy, forms = columns_in(record, prefix, others), columns_in(described, prefix, others)
        shown, columns = segments_of(of_policy, forms, tokenizer)
        segments += [{**segment, **({"policy": prefix[:-1]} if prefix else {})} for segment in shown]
        named |= {prefix + name for name in (*columns, *PAYLOAD)}
    metadata = json.loads(record["metadata"]) if record.get("metadata") else {}
    texts = {"prompt": record.get(PROMPT_TEXT), "response": record.get(RESPONSE_TEXT)}
    left = sorted(set(described) - named)
    return {"numbers": numbers, "metadata": metadata, "segments": segments, "texts": texts, "other_columns": left}


def columns_in(table: Mapping[str, Any], prefix: str, others: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns of a namespace under plain names; without one those outside the namespaces `others`."""
    if not prefix:
        return {name: value for name, value in table.items() if not name.startswith(others)}
    return {name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)}


def segments_of(
    record: Mapping[str, Any], described: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the segments of one policy's trajectory, and the names of the columns whose values they show."""
    ragged = {name for name, about in described.items() if about["kind"] == "ragged" and not about["shape"]}
    mask = record.get(MASK) or []
    actions, turns = sum(mask), len(record.get("turn_lengths") or [])
    columns = {name: record[name] for name in ragged - set(PAYLOAD) if record[name] is not None}
    per_turn = {name: v for name, v in columns.items() if name.startswith(PER_TURN) and len(v) == turns}
    per_token = {name: v for name, v in columns.items() if name not in per_turn and len(v) == actions}
    spans = json.loads(record.get("images") or "[]")
    segments = [
        segment_of(
            kind, turn, sequence, tokens, per_turn, first, per_token, tokenizer, spans_in(spans, begin, len(tokens))
        )
        for kind, turn, sequence, tokens, first, begin in segment_tokens(record)
    ]
    return segments, {*per_turn, *per_token}


def spans_in(spans: Sequence[Sequence[Any]], begin: int, count: int) -> dict[int, tuple[str, int]]:
    """Return the name and size of each image in `count` tokens from `begin` on, keyed by its first token there."""
    return {start - begin: (name, tokens) for name, start, tokens in spans if begin <= start < begin + count}


def segment_tokens(record: Mapping[str, Any]) -> Iterator[tuple[str, int | None, int, list[int], int, int]]:
    """Yield (kind, turn, sequence, token ids, number of the first sampled token, position) of each segment of a row."""
    tokens, mask = record.get("tokens") or record.get("prompt") or [], record.get(MASK) or []
    mask = mask or [False] * len(tokens)
    ends = np.cumsum(record.get("turn_lengths") or [sum(mask)]).tolist()
    starts = {0, *np.cumsum(record.get("sequence_lengths") or [len(tokens)]).tolist()}
    key, begin, sampled, first, sequence = None, 0, 0, 0, -1
    for position in range(len(tokens) + 1):
        if position < len(tokens):
            sequence += position in starts
            turn = int(np.searchsorted(ends, sampled, side="right")) if mask[position] else None
            now = (turn, sequence)
        if position == len(tokens) or now != key:
            if key is not None:
                kind = "model" if key[0] is not None else "context" if begin in starts else "observation"
                yield kind, key[0], key[1], tokens[begin:position], first, begin
            key, begin, first = now, position, sampled
        sampled += position < len(tokens) and bool(mask[position])


def segment_of(
    kind: str,
    turn: int | None,
    sequence: int,
    tokens: Sequence[int],
    per_turn: Mapping[str, Sequence[Any]],
    first: int,
    per_token: Mapping[str, Sequence[Any]],
    tokenizer: Tokenizer | None,
    images: Mapping[int, tuple[str, int]],
) -> dict[str, Any]:
    """Return a segment as JSON; without a tokenizer texts are None. `images` are those among its tokens."""
    shown: dict[str, Any] = {"kind": kind, "turn": turn, "sequence": sequence, "count": len(tokens), "tokens": []}
    if turn is not None:
        shown["values"] = {name: plain(values[turn]) for name, values in per_turn.items() if turn < len(values)}
    texts, text, number = list[str](), list[int](), 0

    def text_so_far() -> str:
        return "" if tokenizer is None else tokenizer.decode(text, skip_special_tokens=False)

    while number < len(tokens):
        if number in images:
            name, size = images[number]
            shown["tokens"].append({"id": tokens[number], "text": f"[image, {size} tokens]", "image": name})
            texts += [text_so_far(), f"[image {name}, {size} tokens]"]
            text.clear()
            number += size
            continue
        piece = None if tokenizer is None else tokenizer.decode([tokens[number]], skip_special_tokens=False)
        of = {name: plain(values[first + number]) for name, values in per_token.items()} if turn is not None else {}
        shown["tokens"].append({"id": tokens[number], "text": piece, **of})
        text.append(tokens[number])
        number += 1
    shown["text"] = None if tokenizer is None else "".join([*texts, text_so_far()])
    return shown

"""Prompts and given responses as token ids, batch by batch, with a bar for what takes long; every fault named with its place.

examples ──render──▶ texts ──tokenizer, a batch at a time──▶ int32 token ids
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from braidrl.algorithms.ragged import Ragged
from braidrl.data.records import place
from braidrl.data.sources import Example
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

T = TypeVar("T")
BATCH = 512
PROGRESS_AFTER_S = 2.0


def tokenize(
    path: Path, examples: Sequence[Example], template: PromptTemplate, max_prompt_tokens: int
) -> tuple[Ragged, list[int]]:
    """Return the int32 token ids of prompts that are short enough, and the length of every prompt.

    Raises UserError with the place of a prompt that the template refuses or that has no tokens.
    """
    lengths: list[int] = []

    def short_ones() -> Iterator[list[list[int]]]:
        for batch in with_progress(in_batches(examples), len(examples), f"Tokenising prompts of {path.name}"):
            ids = tokenize_batch(path, batch, template)
            lengths.extend(map(len, ids))
            yield [row for row in ids if len(row) <= max_prompt_tokens]

    return joined(short_ones()), lengths


def tokenize_batch(path: Path, batch: Sequence[Example], template: PromptTemplate) -> list[list[int]]:
    """Return the token ids of prompts. Raises UserError with the place of one that the template refuses or that has no tokens."""
    ids = template.encode_text([render_at(path, example, template) for example in batch])
    for example, row in zip(batch, ids, strict=True):
        if not row:
            where = place(path, example.line)
            raise UserError(f"{where}: the tokenizer makes no token of this prompt; write some text")
    return ids


def tokenize_responses(path: Path, texts: Sequence[str], template: PromptTemplate) -> Ragged:
    """Return the int32 token ids of given responses, each with its end of sequence."""
    batches = with_progress(in_batches(texts), len(texts), f"Tokenising responses of {path.name}")
    return joined(template.encode_responses(batch) for batch in batches)


def render_at(path: Path, example: Example, template: PromptTemplate) -> str:
    try:
        return template.render(example.prompt)
    except UserError as error:
        raise UserError(f"{place(path, example.line)}: {error}") from None


def joined(batches: Iterable[list[list[int]]]) -> Ragged:
    """Join the token ids of all batches as int32; lists live only as long as their batch."""
    parts = [Ragged.from_rows(batch, torch.int32) for batch in batches]
    return Ragged.cat(parts) if parts else Ragged.from_rows([], torch.int32)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield so many items at a time."""
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def with_progress(
    batches: Iterable[Sequence[T]], total: int | None, title: str, after_s: float = PROGRESS_AFTER_S
) -> Iterator[Sequence[T]]:
    """Yield the same batches; a bar appears on stderr if they take longer than `after_s` seconds."""
    started = time.monotonic()
    done = 0
    with ExitStack() as stack:
        progress: Progress | None = None
        for batch in batches:
            if progress is None and time.monotonic() - started >= after_s:
                progress = stack.enter_context(Progress(console=Console(stderr=True)))
                task = progress.add_task(title, total=total)
            yield batch
            done += len(batch)
            if progress is not None:
                progress.update(task, completed=done)

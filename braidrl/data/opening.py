"""Opened sources: a run draws prompts from a long file while it is still being tokenized.

The order of a source is a permutation of its *kept* examples, so the run must know which prompts are too long. A token
has at least one byte: only lines with more bytes than `max_prompt_tokens` are doubtful, and these are tokenised first.

lines ──more bytes than the limit──▶ doubtful, tokenised by all ranks ──▶ dropped ──▶ number of kept examples
  │                                                                                          │
  ├──a thread of each rank: batches ──▶ part of the table                                    ▼
  ╰──position of the example number i ◀────────────────────────────────────────── the run draws i

A row that is drawn before the table is complete is made from its line. Once all parts are written, the table replaces
the lines, and results of the complete file are checked: the rows are the same.
"""

import atexit
import copy
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from braidrl.config import DataConfig
from braidrl.data.lines import Lines
from braidrl.data.packing import equal_share
from braidrl.data.records import place
from braidrl.data.sources import Example, Reading
from braidrl.data.tables import (
    BATCH,
    Facts,
    LoadingRanks,
    OwnBatches,
    own_batches_of,
    rows_of,
    shown,
    with_progress,
    write_part,
)
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError

LEAST_LINES = 20_000
"""Shorter files are read before the run starts, in some seconds."""
MOST_DOUBTFUL = 10_000
"""Doubtful lines for each rank: with more of them the whole file is read before the run starts."""
NICENESS = 10


class Opening:
    """A table that is being written, and the rows of its source by position until it is complete."""

    def __init__(
        self, reading: Reading, data: DataConfig, template: PromptTemplate, lines: Lines, dropped: np.ndarray
    ) -> None:
        """Store the sorted positions of the lines whose prompts are too long."""
        self.reading, self.data, self.template, self.lines, self.dropped = reading, data, template, lines, dropped
        self.facts = Facts(read=len(lines))
        """What is known before the whole file is read; `longest_prompt` is a bound."""
        # The thread collects notes in a separate reading.
        self._drawn, self._last = Reading(reading.source, usual_split=reading.usual_split), (-1, dict[str, Any]())
        self._share: OwnBatches | None = None
        self._outcome: dict[str, Any] | BaseException = {}
        self._thread = threading.Thread(target=self._write, name="reading", daemon=True)

    def __len__(self) -> int:
        return len(self.lines) - len(self.dropped)

    def row(self, index: int) -> dict[str, Any]:
        """Return the row of the table for a kept example. Raises UserError if it is invalid or too long."""
        last, row = self._last
        if last != index:
            if not 0 <= index < len(self):
                raise IndexError(index)
            before = self.dropped - np.arange(len(self.dropped))
            position = index + int(np.searchsorted(before, index, side="right"))
            (line,) = self.lines.at([position])
            (rows,) = self._rows(self._drawn, [[self._drawn.example_of(*line)]], Facts())
            if not rows:
                raise UserError(
                    f"{place(self.reading.source.path, line[0])}: the prompt has more than "
                    f"data.max_prompt_tokens={self.data.max_prompt_tokens} tokens though the line is short; remove it, "
                    "or raise data.max_prompt_tokens"
                )
            (row,) = rows
            self._last = index, row
        return row

    def _rows(self, reading: Reading, batches: Iterable[list[Example]], facts: Facts) -> Iterator[list[dict[str, Any]]]:
        return rows_of(reading, batches, self.template, self.data.max_prompt_tokens, 0, facts)

    def begin(self, share: OwnBatches | None, folder: Path) -> None:
        """Start to write this rank's part of the table."""
        # Two threads may not use one tokenizer.
        template = replace(self.template, tokenizer=copy.deepcopy(self.template.tokenizer))
        self._share, self._folder, self._template = share, folder, template
        atexit.register(self.stop)
        self._thread.start()

    def _write(self) -> None:
        with suppress(OSError):
            # The run's work has priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._outcome = write_part(self._share, self._template, self.data, self._folder)
        except BaseException as error:  # it is raised in the thread that reads the outcome
            self._outcome = error

    def is_written(self, wait: bool, shows: bool = False) -> bool:
        """Return True if this rank's part is written, or has failed; with `wait` wait for that."""
        if wait and shows:
            with shown(f"Tokenising {self.reading.source.label}"):
                self._thread.join()
        elif wait:
            self._thread.join()
        return not self._thread.is_alive()

    def outcome(self) -> dict[str, Any]:
        """Return the result of `write_part`, or raise its error."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        if self._share is not None:
            self._share.stopped.set()
        self._thread.join()


def opened(
    reading: Reading, data: DataConfig, template: PromptTemplate, ranks: LoadingRanks, lines: Lines, folder: Path
) -> Opening | None:
    """Start to write the table of a source, and return its rows until the table is complete.

    Returns None if the source is short, or has many lines that may be too long. All ranks call this together. Raises
    UserError in all ranks, for an invalid example among the doubtful lines.
    """
    limit = data.max_prompt_tokens
    try:
        added = len(template.encode("a"))
    except UserError:  # the template refuses this conversation, but perhaps not others
        return None
    bounds = lines.sizes + added
    doubtful = np.flatnonzero(bounds > limit)
    if len(lines) < LEAST_LINES or len(doubtful) > MOST_DOUBTFUL * ranks.size or len(doubtful) == len(lines):
        return None
    opening = Opening(reading, data, template, lines, np.empty(0, np.int64))
    longest = int(bounds[bounds <= limit].max())
    opening.facts.longest_prompt = limit if len(doubtful) else longest
    share = equal_share(len(doubtful), ranks.rank, ranks.size)
    answer: dict[str, Any] = {}
    try:
        answer["dropped"] = too_long(opening, doubtful[share.start : share.stop], shows=ranks.rank == 0)
    except UserError as error:
        answer["refused"] = str(error)
    answers = ranks.gather(f"data {reading.source.label}: doubtful", answer)
    if refused := [part["refused"] for part in answers if "refused" in part]:
        raise UserError(refused[0])
    opening.dropped = np.array([position for part in answers for position in part["dropped"]], np.int64)
    opening.begin(own_batches_of(reading, ranks, None, lines), folder)
    return opening


def too_long(opening: Opening, positions: np.ndarray, shows: bool) -> list[int]:
    """Return which of some lines have a prompt that is too long. Raises UserError for an invalid one."""
    reading, lines = Reading(opening.reading.source), opening.lines
    starts = range(0, len(positions), BATCH)
    batches: Iterable[list[tuple[int, bytes]]] = (
        list(lines.at(positions[start : start + BATCH].tolist())) for start in starts
    )
    batches = with_progress(batches, f"Measuring {reading.source.label}", total=len(positions)) if shows else batches
    examples = ([reading.example_of(*line) for line in batch] for batch in batches)
    rows = opening._rows(reading, examples, Facts())
    kept = {json.loads(row["example"])[4] for batch in rows for row in batch}
    return [position for position in positions.tolist() if int(lines.starts[position, 1]) not in kept]

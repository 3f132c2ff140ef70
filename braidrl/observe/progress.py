"""Terminal progress of a run: one line per stage that takes over two seconds, with rates and rows in flight.

A terminal's lines are redrawn in place, only on a progress report: no thread draws behind a breakpoint.
A log file or a pipe gets one plain line every ten seconds, without control characters.
"""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from braidrl.observe.stalls import WORK

SHOW_AFTER = 2.0
REDRAW_EVERY = 0.1
PLAIN_EVERY = 10.0
BAR_WIDTH = 28


class Bar:
    """One running stage: rows done of a total, tokens, and rows in flight."""

    def __init__(self, name: str, total_rows: int | None, started: float, changed: Callable[[], None]) -> None:
        self.name = name
        self.total_rows = total_rows
        self.started = started
        self.rows = 0
        self.tokens = 0
        self.in_flight: int | None = None
        self._changed = changed

    def update(
        self, rows: int = 0, tokens: int = 0, in_flight: int | None = None, total_rows: int | None = None
    ) -> None:
        """Add `rows` and `tokens` to the totals; `in_flight` and `total_rows` replace the old values."""
        self.rows += rows
        self.tokens += tokens
        self.in_flight = self.in_flight if in_flight is None else in_flight
        self.total_rows = self.total_rows if total_rows is None else total_rows
        WORK.advanced()
        self._changed()

    def details(self, now: float) -> list[str]:
        """Format rows done, tokens per second since the stage began, rows in flight, and the time, as far as known."""
        parts = [f"{self.rows:,} rows" if self.total_rows is None else f"{self.rows:,}/{self.total_rows:,} rows"]
        if self.tokens:
            parts.append(f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s")
        if self.in_flight is not None:
            parts.append(f"{self.in_flight:,} in flight")
        return [*parts, spell_seconds(now - self.started)]


class Progress:
    """The stages that run now, shown on the terminal. Stages may be nested or run in several threads."""

    def __init__(
        self, steps: int | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic,
        shown: bool = True,
    ) -> None:  # fmt: skip
        """Start without stages; `steps` is the number of iterations, and the stream is by default stderr.

        Of several equal processes only one is `shown`.
        """
        self._steps = steps
        self._console = Console(file=(stream or sys.stderr) if shown else io.StringIO(), highlight=False)
        self._clock = clock if shown else lambda: 0.0
        self._lock = threading.RLock()
        self._step: int | None = None
        self._bars: list[Bar] = []
        self._live: Live | None = None
        self._last_shown = self._clock()

    def step(self, step: int) -> None:
        """Set the iteration of the stages that follow."""
        with self._lock:
            self._step = step

    def print(self, line: str) -> None:
        """Print a permanent line above the bars."""
        with self._lock:
            self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total_rows: int | None = None) -> Iterator[Bar]:
        """Show a stage while the block runs; `total_rows` is None if unknown."""
        bar = Bar(name, total_rows, self._clock(), self._changed)
        with self._lock:
            self._bars.append(bar)
        try:
            yield bar
        finally:
            with self._lock:
                self._bars.remove(bar)
                self._changed()

    def _changed(self) -> None:
        with self._lock:
            now = self._clock()
            slow = [bar for bar in self._bars if now - bar.started > SHOW_AFTER]
            if self._console.is_terminal:
                self._draw(slow, now)
            elif now - self._last_shown >= PLAIN_EVERY:
                for bar in slow:
                    where = " ".join(filter(None, [self._where(), bar.name]))
                    self.print(f"{where}: {', '.join(bar.details(now))}")
                    self._last_shown = now

    def _draw(self, slow: Sequence[Bar], now: float) -> None:
        if slow and self._live is not None and now - self._last_shown < REDRAW_EVERY:
            return
        self._last_shown = now
        if not slow and self._live is not None:
            self._live.stop()
            self._live = None
        if not slow:
            return
        table = Table.grid(padding=(0, 1))
        for bar in slow:
            drawn = ProgressBar(bar.total_rows, min(bar.rows, bar.total_rows or 0), width=BAR_WIDTH)
            table.add_row(self._where(), bar.name, drawn if bar.total_rows else "", " · ".join(bar.details(now)))
        if self._live is None:
            self._live = Live(table, console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        else:
            self._live.update(table, refresh=True)

    def _where(self) -> str:
        if self._step is None:
            return ""
        return f"step {self._step}" if self._steps is None else f"step {self._step}/{self._steps}"


def spell_seconds(seconds: float) -> str:
    """Format a duration as `7 s`, `3:07 min` or `2:05 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"

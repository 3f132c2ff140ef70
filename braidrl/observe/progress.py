"""Terminal progress of a run: one line per stage that takes over two seconds, with rates and rows in flight.

A terminal's lines are redrawn in place, only on a progress report: no thread draws behind a breakpoint.
A log file or a pipe gets one plain line every ten seconds, without control characters.
"""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from braidrl.errors import printable
from braidrl.observe.stalls import WORK

SHOW_AFTER = 2.0
REDRAW_EVERY = 0.1
PLAIN_EVERY = 10.0
BAR_WIDTH = 28


class Terminal(Console):
    """A console that escapes control characters in texts, which may come from data or models."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text as rich shows it, without control characters."""
        return super().render_str(printable(text, keep="\n\t"), **settings)


@dataclass(eq=False)
class Bar:
    """One running stage: rows done of a total, tokens, and rows in flight."""

    name: str
    total_rows: int | None
    started: float
    changed: Callable[[], None]
    rows: int = 0
    tokens: int = 0
    in_flight: int | None = None
    other_ranks: tuple[int, int, int] = (0, 0, 0)
    """Rows done, tokens and all rows of the other ranks."""

    def update(
        self, rows: int = 0, tokens: int = 0, in_flight: int | None = None, total_rows: int | None = None
    ) -> None:
        """Add `rows` and `tokens` to the totals; `in_flight` and `total_rows` replace the old values."""
        self.rows += rows
        self.tokens += tokens
        self.in_flight = self.in_flight if in_flight is None else in_flight
        self.total_rows = self.total_rows if total_rows is None else total_rows
        WORK.advanced()
        self.changed()

    def show_others(self, rows: int, tokens: int, total_rows: int) -> None:
        """Add the rows of other ranks to those of this rank."""
        self.other_ranks = rows, tokens, total_rows
        self.changed()


class Progress:
    """The running stages, shown on the terminal.

    Stages may be nested or run in several threads.
    """

    def __init__(
        self,
        steps: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        shown: bool = True,
        bars: bool = True,
    ) -> None:
        """Start without stages; the run has `steps` iterations.

        Of several equal processes only one is `shown`. Without `bars` it shows only printed lines.
        """
        self.step: int | None = None
        """The iteration of the stages that follow, set by the run."""
        self._steps = steps
        self._console = Terminal(file=(stream or sys.stderr) if shown else io.StringIO(), highlight=False)
        self._clock = clock if shown and bars else lambda: 0.0
        self._lock = threading.RLock()
        self._bars: list[Bar] = []
        self._live: Live | None = None
        self._last_shown = self._clock()

    def show(self) -> None:
        """Show lines, without bars, from now on in a process that was not `shown`."""
        self._console = Terminal(file=sys.stderr, highlight=False)

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
        """Show the slow stages, unless they were just shown: redrawn on a terminal, as plain lines elsewhere."""
        with self._lock:
            now, terminal = self._clock(), self._console.is_terminal
            slow = [bar for bar in self._bars if now - bar.started > SHOW_AFTER]
            if terminal and self._live and not slow:
                self._live.stop()
                self._live = None
            wait = PLAIN_EVERY if not terminal else REDRAW_EVERY if self._live else 0.0
            if not slow or now - self._last_shown < wait:
                return
            self._last_shown = now
            last = "" if self._steps is None else f"/{self._steps}"
            where = "" if self.step is None else f"step {self.step}{last}"
            table = Table.grid(padding=(0, 1))
            for bar in slow:
                other_rows, other_tokens, other_total = bar.other_ranks
                rows, tokens = bar.rows + other_rows, bar.tokens + other_tokens
                total = None if bar.total_rows is None else bar.total_rows + other_total
                about = [f"{rows:,} rows" if total is None else f"{rows:,}/{total:,} rows"]
                about += [f"{tokens / max(now - bar.started, 1e-9):,.0f} tokens/s"] if tokens else []
                about += [] if bar.in_flight is None else [f"{bar.in_flight:,} in flight"]
                about.append(spell_seconds(now - bar.started))
                drawn = ProgressBar(total, min(rows, total), width=BAR_WIDTH) if total else ""
                table.add_row(where, bar.name, drawn, " · ".join(about))
                if not terminal:
                    self.print(f"{' '.join(filter(None, [where, bar.name]))}: {', '.join(about)}")
            if terminal and self._live is None:
                self._live = Live(table, console=self._console, auto_refresh=False, transient=True)
                self._live.start(refresh=True)
            elif self._live is not None:
                self._live.update(table, refresh=True)


def spell_seconds(seconds: float) -> str:
    """Format a duration as `7 s`, `3:07 min` or `2:05 h`."""
    rounded = int(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02} min"
    return f"{rounded // 3600}:{rounded % 3600 // 60:02} h"

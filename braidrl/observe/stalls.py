"""Stall detection from a process's own history: each piece of work compares its time without progress with earlier
ones.

work begins ──rows done──▶ progress ──▶ ... ──▶ work ends        longest time without progress, by name of the work
heartbeat ──each second──▶ ten times the longest recent one? ──▶ reported to the parent process

Work without a history (loading, a first compilation) is not checked: only `cluster.wait_limit_s` and other limits apply
to it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

TIMES = 10.0
"""Work stalls after this many times the longest recent time without progress."""
RECENT, ENOUGH = 20, 3
"""Number of pieces of work kept per name; a history is complete at this number."""


class Stall(NamedTuple):
    """Work without progress for `seconds`; the longest recent interval without progress was `usual` seconds."""

    name: str
    seconds: float
    usual: float

    def described(self) -> str:
        return (
            f"made no progress in {self.name} for {self.seconds:.0f} s, where {self.usual:.1f} s were the longest of "
            "late"
        )


@dataclass
class PieceOfWork:
    """Work in progress, and its longest interval without progress."""

    name: str
    started: float
    longest: float = 0.0


@dataclass
class OwnWork:
    """All work of one process.

    Pieces may be nested or in several threads; progress of one counts for all.
    """

    clock: Callable[[], float] = time.monotonic
    on_advance: Callable[[], object] = lambda: None
    """Called at each sign of progress."""
    _pieces: list[PieceOfWork] = field(default_factory=list)
    _history: dict[str, deque[float]] = field(default_factory=dict)
    _advanced: float = 0.0
    _waits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> PieceOfWork:
        """Start a piece of work and return it for `end`."""
        self.advanced()
        piece = PieceOfWork(name, self._advanced)
        with self._lock:
            self._pieces.append(piece)
        return piece

    def end(self, piece: PieceOfWork) -> None:
        """Record that a piece of work is done."""
        self.advanced()
        with self._lock:
            self._pieces.remove(piece)
            self._history.setdefault(piece.name, deque(maxlen=RECENT)).append(piece.longest)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Record work while the block runs."""
        piece = self.begin(name)
        try:
            yield
        finally:
            self.end(piece)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that the block waits for another process, to which a stall is then attributed."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
            self.advanced()

    def advanced(self) -> None:
        """Record progress of all work."""
        now = self.clock()
        with self._lock:
            for piece in self._pieces:
                piece.longest = max(piece.longest, now - max(self._advanced, piece.started))
            self._advanced = now
        self.on_advance()

    def stalled(self) -> Stall | None:
        """Return the work that stalls, or None."""
        with self._lock:
            seconds = self.clock() - self._advanced
            for piece in self._pieces if not self._waits else ():
                durations = self._history.get(piece.name, ())
                if len(durations) >= ENOUGH and seconds > TIMES * max(durations):
                    return Stall(piece.name, seconds, max(durations))
        return None


WORK = OwnWork()

"""What this process works on, and whether it has come further: one that lives and makes no progress is told by its own history.

work begins ──rows done──▶ sign of progress ──▶ ... ──▶ work ends        stretches without a sign, by the name of the work
heartbeat ──each second──▶ a stretch ten times as long as the longest of late? ──▶ told to whoever has started this process

Work without a history (loading, a first compilation) is left alone: it ends, or `cluster.wait_limit_s` and the like do.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

TIMES = 10.0
"""A stretch is too long that is so many times the longest of late."""
RECENT, ENOUGH = 20, 3
"""How many pieces of work of one name are remembered, and from how many on there is a history."""


class Stall(NamedTuple):
    """Work that has not come further for `seconds`, where `usual` seconds were the longest stretch of late."""

    name: str
    seconds: float
    usual: float

    def said(self) -> str:
        """Return it in words."""
        return f"made no progress in {self.name} for {self.seconds:.0f} s, where {self.usual:.1f} s were the longest of late"


@dataclass
class PieceOfWork:
    """Something that is being done, and the longest stretch in it without a sign of progress."""

    name: str
    begun: float
    longest: float = 0.0


@dataclass
class OwnWork:
    """All that one process does; pieces may be nested or in several threads, and a sign of progress counts for each of them."""

    clock: Callable[[], float] = time.monotonic
    _pieces: list[PieceOfWork] = field(default_factory=list)
    _history: dict[str, deque[float]] = field(default_factory=dict)
    _advanced: float = 0.0
    _waits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> PieceOfWork:
        """Return a piece of work that begins now, for `end`."""
        self.advanced()
        piece = PieceOfWork(name, self._advanced)
        with self._lock:
            self._pieces.append(piece)
        return piece

    def end(self, piece: PieceOfWork) -> None:
        """Note that a piece of work is done."""
        self.advanced()
        with self._lock:
            self._pieces.remove(piece)
            self._history.setdefault(piece.name, deque(maxlen=RECENT)).append(piece.longest)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Note work while the block runs."""
        piece = self.begin(name)
        try:
            yield
        finally:
            self.end(piece)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the block waits for another process, which is the one to be named if nothing happens."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
            self.advanced()

    def advanced(self) -> None:
        """Note that work has come further."""
        now = self.clock()
        with self._lock:
            for piece in self._pieces:
                piece.longest = max(piece.longest, now - max(self._advanced, piece.begun))
            self._advanced = now

    def stalled(self) -> Stall | None:
        """Return the work that has not come further for too long, or None."""
        with self._lock:
            seconds = self.clock() - self._advanced
            for piece in self._pieces if not self._waits else ():
                known = self._history.get(piece.name, ())
                if len(known) >= ENOUGH and seconds > TIMES * max(known):
                    return Stall(piece.name, seconds, max(known))
        return None


WORK = OwnWork()
"""This process's."""

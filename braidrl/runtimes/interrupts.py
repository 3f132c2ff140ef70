"""Ctrl-C at safe points: at once while rows are generated, after the iteration while weights change."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from braidrl.cluster.process import interrupts_handled

REPEATED_S = 1.0
"""A second signal within this many seconds is a duplicate: the terminal and the launcher of ranks both send one."""


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt; inside `hold()` only when the hold ends.

    Ranks that must stop together are not `alone`: a signal takes effect when they agree, and at once only in local work.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self._holds = 0
        self._first: float | None = None
        self._local = False
        self.asked = False
        """True from a stop request until the stop."""
        self.torn = False
        """True after a second signal broke a hold: weights may be inconsistent and must not be saved."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with interrupts_handled(self._handle):
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delay an interrupt until the outermost hold ends, or until several ranks agree after it; a second Ctrl-C is not delayed."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.alone:
            self.agree(self.asked)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Mark work in which no other rank takes part. Inside a hold this has no effect."""
        self._local = not self._holds
        try:
            yield
        finally:
            self._local = False

    def agree(self, anybody: bool) -> None:
        """Raise KeyboardInterrupt on every calling rank if any rank was asked to stop and no hold is active."""
        if anybody and not self._holds:
            self.asked = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.alone:
            if self._holds and not self.asked:
                self.asked = True
                return
            self.torn = self._holds > 0
            raise KeyboardInterrupt
        now = time.monotonic()
        if self._first is not None and now - self._first > REPEATED_S:
            # Ranks that leave one by one are at different places, and their joint state cannot be resumed.
            self.torn = True
            raise KeyboardInterrupt
        if self._first is None:
            self._first, self.asked = now, True
            if self._local:
                raise KeyboardInterrupt

"""Ctrl-C at a moment when the run can be saved: at once while rows are being made, after the iteration while weights change."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from braidrl.cluster.process import interrupts_handled


class Interrupts:
    """While active, SIGINT and SIGTERM raise KeyboardInterrupt, except inside `hold()`: then when the hold ends."""

    ALONE = True
    """Whether this process stops by itself."""

    def __init__(self) -> None:
        self._holds = 0
        self.asked = False
        """True while this process was asked to stop and has not yet."""
        self.torn = False
        """True once a second signal broke into a hold: weights may be half changed and must not be saved."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with interrupts_handled(self._handle):
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep an interrupt waiting until the outermost hold ends, or of several ranks until they meet after it; a second Ctrl-C is not."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.ALONE:
            self.agree(self.asked)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Around work that no other rank takes part in."""
        yield

    def agree(self, anybody: bool) -> None:
        """Raise KeyboardInterrupt, on every rank that calls this, if `anybody` was asked to stop and nothing holds it."""
        if anybody and not self._holds:
            self.asked = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holds and not self.asked:
            self.asked = True
            return
        self.torn = self._holds > 0
        raise KeyboardInterrupt


class AgreedInterrupts(Interrupts):
    """For ranks that must all stop at the same place: a signal counts when they meet, and at once only in work of one's own."""

    ALONE = False
    REPEATED_S = 1.0
    """A second signal within this time is the first one, which came from the terminal and from the launcher."""

    def __init__(self) -> None:
        super().__init__()
        self._first: float | None = None
        self._local = False

    @contextmanager
    def local(self) -> Iterator[None]:
        """Around work that no other rank takes part in; not inside a hold, which it does not end."""
        self._local = not self._holds
        try:
            yield
        finally:
            self._local = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > self.REPEATED_S:
            # Ranks that leave one by one are at different places: together they hold no state to go on from.
            self.torn = True
            raise KeyboardInterrupt
        if self._first is None:
            self._first, self.asked = now, True
            if self._local:
                raise KeyboardInterrupt

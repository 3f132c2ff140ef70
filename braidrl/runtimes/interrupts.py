"""Ctrl-C at a moment when the run can be saved: at once while rows are being made, after the iteration while weights change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """While active, SIGINT and SIGTERM raise KeyboardInterrupt, except inside `hold()`: then when the hold ends."""

    def __init__(self) -> None:
        self._holds = 0
        self._waiting = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Installs the handlers; in another thread than the main one Python allows none, and nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps an interrupt waiting until the outermost hold ends; a second Ctrl-C is not kept waiting."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self._waiting and not self._holds:
            self._waiting = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holds and not self._waiting:
            self._waiting = True
            return
        raise KeyboardInterrupt

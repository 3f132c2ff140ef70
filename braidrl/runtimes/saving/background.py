"""Background writes: a thread writes a checkpoint while its process continues; the caller gets the outcome later.

driver ──save, copy──▶ worker: copies ──▶ thread: writes        the worker trains on
       ──written─────────────────────────▶ trouble, or none
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from braidrl.errors import first_line
from braidrl.training.roles.checkpoint import Write

TROUBLES = (OSError, SafetensorError, CheckpointException)
"""Errors of a full or missing disk."""
WRITE_LIMIT_S = 3600.0
"""Time limit for one write, to disk or shared memory."""


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Writes one thing after the other; as a context manager it waits at the end."""

    def __init__(self, what: str = "the checkpoint") -> None:
        """Start without work. `what` names the content in time-out messages."""
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what)
        self._begun: Future[Any] | None = None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, parts: Sequence[Write]) -> None:
        """Wait for the previous work, then make the calls in the thread. Raises as `wait` does."""
        self.wait()
        calls = list(parts)
        self._begun = self._thread.submit(lambda: [part() for part in calls])

    @property
    def goes_on(self) -> bool:
        """Return True while the thread writes."""
        return self._begun is not None and not self._begun.done()

    def check(self) -> None:
        """Raise, once, the error of the last write; return at once while the thread still writes."""
        if not self.goes_on:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of the write, once."""
        if self._begun is not None:
            # After an interrupt the next call raises it.
            try:
                error = self._begun.exception(WRITE_LIMIT_S)
            except TimeoutError:
                raise TimeoutError(f"{self._what} could not be written within {WRITE_LIMIT_S:g} s") from None
            self._begun = None
            if error is not None:
                raise error

    def trouble(self) -> str:
        """Wait, and return the disk error in one line, or an empty string. Raises all other errors."""
        try:
            self.wait()
        except TROUBLES as error:
            return first_line(error)
        return ""


def check_written(trouble: str) -> None:
    """Raise OSError if a worker had a disk error."""
    if trouble:
        raise OSError(trouble)

"""What a process writes in a thread while it goes on, as a checkpoint is written; whoever asked for it hears how that ended.

driver ──copy_for_saving──▶ worker: copies ──▶ thread: writes        the worker trains on
       ──written──────────────────────────────▶ trouble, or none
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from braidrl.errors import first_line
from braidrl.training.roles.checkpoint import Write

TROUBLES = (OSError, SafetensorError, CheckpointException)
"""What a disk that is full, or gone, ends in."""
WRITE_LIMIT_S = 3600.0
"""How long a disk, or memory, may take what is written at once."""


class BackgroundWriter:
    """Writes one thing after the other; as a context manager it waits at its end for what was begun."""

    def __init__(self, what: str = "the checkpoint") -> None:
        """Begin nothing yet. `what` says in a message what could not be written in time."""
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what)
        self._begun: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, parts: Sequence[Write]) -> None:
        """Make the calls in the thread, after what was begun before. Raises as `wait` does for that."""
        self.wait()
        self._begun = self._thread.submit(write, parts)

    @property
    def goes_on(self) -> bool:
        return self._begun is not None and not self._begun.done()

    def check(self) -> None:
        """Raise, once, why what was begun could not be written; return at once while the thread still writes."""
        if not self.goes_on:
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is written. Raises what kept it from being written, once."""
        if self._begun is not None:
            # An interrupt leaves it to the next call.
            try:
                error = self._begun.exception(WRITE_LIMIT_S)
            except TimeoutError:
                raise TimeoutError(f"{self._what} could not be written within {WRITE_LIMIT_S:g} s") from None
            self._begun = None
            if error is not None:
                raise error

    def trouble(self) -> str:
        """Wait, and return in one line why what was begun could not be written, or nothing. Raises what is no trouble of the disk's."""
        try:
            self.wait()
        except TROUBLES as error:
            return first_line(error)
        return ""


def write(parts: Sequence[Write]) -> None:
    """Make every call."""
    for part in parts:
        part()


def check_written(trouble: str) -> None:
    """Raise OSError where a worker had trouble."""
    if trouble:
        raise OSError(trouble)

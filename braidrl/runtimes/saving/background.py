"""What a process writes of a checkpoint in a thread while it goes on; whoever asked for it hears how that ended.

driver ──copy_for_saving──▶ worker: copies ──▶ thread: writes        the worker trains on
       ──written──────────────────────────────▶ trouble, or none
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from braidrl.errors import first_line
from braidrl.models.checkpoint import Write

TROUBLES = (OSError, SafetensorError, CheckpointException)
"""What a disk that is full, or gone, ends in."""
WRITE_LIMIT_S = 3600.0
"""How long a disk may take to write one checkpoint."""


class BackgroundWriter:
    """One thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._begun: Future[None] | None = None

    def begin(self, parts: Sequence[Write]) -> None:
        """Make the calls in the thread."""
        self._begun = self._thread.submit(write, parts)

    @property
    def goes_on(self) -> bool:
        return self._begun is not None and not self._begun.done()

    def wait(self) -> None:
        """Wait until what was begun is written. Raises what kept it from being written, once."""
        if self._begun is not None:
            # An interrupt leaves it to the next call.
            try:
                error = self._begun.exception(WRITE_LIMIT_S)
            except TimeoutError:
                raise TimeoutError(f"the disk has not taken the checkpoint within {WRITE_LIMIT_S:g} s") from None
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

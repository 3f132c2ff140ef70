"""How a run fails: by a mistake of the user's, told in one line, or in a worker process."""

import errno
import os
import reprlib
from collections.abc import Sequence
from typing import Any

from braidrl.algorithms.registry import suggest

__all__ = [
    "BadUpdate",
    "FailedStep",
    "LostPeers",
    "LostProcess",
    "Problems",
    "UserError",
    "WorkerError",
    "first_line",
    "limit_reached",
    "no_room",
    "shown",
    "suggest",
]
SHOWN = 200
"""Characters of a value that a message shows at most."""


class UserError(Exception):
    """Ends the command with its message alone; `--debug` adds the traceback."""


class Problems(UserError):
    """Several mistakes, one a line."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


class FailedStep(UserError):
    """Too many checks or trajectories of a step failed; the step is complete and saved. Ends the command with exit code 1."""


class BadUpdate(UserError):
    """The gradient of an optimizer step is not finite; nothing was updated."""

    batch: tuple[Any, Any] | None = None
    """Tables of the batch's rows as they are recorded, and with every column; whoever drives the iteration adds them."""


class WorkerError(RuntimeError):
    """A worker process failed: which one, in which stage, on which rows, with its own traceback."""


class LostProcess(WorkerError):
    """A process that a run cannot go on without is gone: the run can start again from its last checkpoint.

    `restarts` says how often it has gone on so already, with the other processes.
    """

    restarts: int = 0


class LostPeers(RuntimeError):
    """Other ranks did not come to a meeting: what a rank sees of another's failure."""


def no_room(error: BaseException) -> str:
    """Return what is to be said of an error that a full disk, or a quota, has caused; nothing for any other."""
    # Libraries have errors of their own for it, which only the system's words tell from others.
    texts = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
    found: BaseException | None = error
    while found is not None:
        if any(text in str(found) for text in texts):
            return f"{first_line(found)}; make room and go on with `braid train --resume`"
        found = found.__cause__ or found.__context__
    return ""


LIMITS = {
    os.strerror(errno.EMFILE): "open files (ulimit -n)",
    os.strerror(errno.ENFILE): "open files of the machine",
    os.strerror(errno.ENOMEM): "memory (ulimit -v)",
    "can't start new thread": "threads (ulimit -u) or memory (ulimit -v)",
}
"""What a process has no more of, by the words of the error."""


def limit_reached(error: BaseException) -> str:
    """Return a message for an error that a limit of this process has caused; nothing for any other."""
    found: BaseException | None = error
    while found is not None:
        for words, what in LIMITS.items():
            if words in str(found) or (isinstance(found, MemoryError) and "ulimit -v" in what):
                return f"this process may have no more {what}: {first_line(found)}; raise the limit"
        found = found.__cause__ or found.__context__
    return ""


def first_line(error: BaseException) -> str:
    """Return the error's own words, without what libraries add in further lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown(value: Any) -> str:
    """Return a value as a message shows it: in one line without control characters, the middle left out of what is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = SHOWN
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    return short.repr(value)

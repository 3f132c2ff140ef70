"""How a run fails: by a mistake of the user's, told in one line, or in a worker process."""

import errno
import os
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
    "no_room",
    "suggest",
]


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


def first_line(error: BaseException) -> str:
    """Return the error's own words, without what libraries add in further lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

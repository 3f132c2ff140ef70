"""How a run fails: by a mistake of the user's, told in one line, or in a worker process."""

from typing import Any

from braidrl.algorithms.registry import suggest

__all__ = ["BadUpdate", "LostPeers", "UserError", "WorkerError", "first_line", "suggest"]


class UserError(Exception):
    """Ends the command with its message alone; `--debug` adds the traceback."""


class BadUpdate(UserError):
    """The gradient of an optimizer step is not finite; nothing was updated."""

    batch: tuple[Any, Any] | None = None
    """Tables of the batch's rows as they are recorded, and with every column; whoever drives the iteration adds them."""


class WorkerError(RuntimeError):
    """A worker process failed: which one, in which stage, on which rows, with its own traceback."""


class LostPeers(RuntimeError):
    """Other ranks did not come to a meeting: what a rank sees of another's failure."""


def first_line(error: BaseException) -> str:
    """Return the error's own words, without what libraries add in further lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Exceptions of a run, for user errors and failed processes, and helpers for messages of one line."""

import errno
import os
import reprlib
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from braidrl.algorithms.registry import suggest as suggest

SHOWN = 200
"""Maximum number of characters of a value in a message."""


def printable(text: str, keep: str = "") -> str:
    """Return a text for terminals and logs: control characters, except those in `keep`, become escapes."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


class UserError(Exception):
    """An error that the user can fix. The command ends with its message; `--debug` adds the traceback."""


class Problems(UserError):
    """Several user errors, one per line."""


class CollectedErrors:
    """Runs checks and collects their user errors, so that one error does not hide the next."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, check: Callable[[], Any]) -> Any:
        """Return the result of a check, or None if it raises UserError."""
        try:
            return check()
        except UserError as error:
            self.lines.extend(line for line in str(error).splitlines() if line not in self.lines)
            return None

    def raise_any(self) -> None:
        """Raise Problems with a line for each error, and a last line with their number if there are several."""
        verdict = f"verdict: {len(self.lines)} things to change before this can run"
        if self.lines:
            raise Problems("\n".join([*self.lines, verdict] if len(self.lines) > 1 else self.lines))


class FailedStep(UserError):
    """Too many verifications or trajectories of a step failed; the step is complete and saved.

    The command ends with exit code 1.
    """


class BadUpdate(UserError):
    """The gradient of an optimizer step is not finite; nothing was updated."""

    batch: tuple[Any, Any] | None = None
    """Two tables of the batch's rows, as recorded and with every column; the runtime adds them."""


class WorkerError(RuntimeError):
    """A worker process failed. The message has the worker, stage, rows and its own traceback."""


class LostProcess(WorkerError):
    """An essential process died: the run can restart from its last checkpoint."""

    is_counted: bool = False
    """True if the budget of repairs has paid for this loss."""
    stage: str = ""
    rows: Sequence[tuple[int, int, int]] = ()
    """The stage and rows that it was working on, if known."""


class LostPeers(RuntimeError):
    """Other ranks did not join a collective operation, because one of them failed."""


LIMITS = {
    os.strerror(errno.EMFILE): "open files (ulimit -n)",
    os.strerror(errno.ENFILE): "open files of the machine",
    os.strerror(errno.ENOMEM): "memory (ulimit -v)",
    "can't start new thread": "threads (ulimit -u) or memory (ulimit -v)",
}
"""Exhausted resources, by the text of the error."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, each once.

    Libraries wrap the system's errors in their own types; only the text stays. An error that is raised again inside its
    handler has itself among its causes.
    """
    yielded = set[int]()
    while error is not None and id(error) not in yielded:
        yielded.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


FULL = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the largest size of a file (ulimit -f)",
}
"""Remedies for a write that failed, by the system's error."""


def no_room(error: BaseException, run: Path | str = "") -> str:
    """Return a message for an error of a full disk or quota, with `run` to resume; empty text for other errors."""
    for cause in causes(error):
        # The text of `shutil.copytree` is a list of (source, target, error).
        text = cause.args[0][0][2] if isinstance(cause, shutil.Error) else first_line(cause)
        for number, remedy in FULL.items():
            if os.strerror(number) in text:
                resumed = f", and go on with `braid train --resume {run}`" if run else ""
                return f"{text.removeprefix(f'[Errno {number}] ')}; {remedy}{resumed}"
    return ""


def limit_reached(error: BaseException) -> str:
    """Return a message for an error caused by a resource limit of this process; empty text for other errors."""
    # oneDNN reports only this, even for unsupported primitives.
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    for cause in causes(error):
        no_memory = isinstance(cause, MemoryError) or (limited and "could not create a primitive" in str(cause))
        for words, what in LIMITS.items():
            if words in str(cause) or (no_memory and "ulimit -v" in what):
                return f"this process may have no more {what}: {first_line(cause)}; raise the limit"
    return ""


@contextmanager
def located(location: str) -> Iterator[None]:
    """Prefix the message of any UserError with a location."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{location}: {error}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def where_raised(error: BaseException, file: str = "") -> str:
    """Return the file and line that raised an exception, as in `rewards.py:3`; the last line in `file` if the error
    passed through it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if f.filename == file] or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


@contextmanager
def users_errors(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Raise UserError, with the line, for an exception in a user's function; those of Braid's functions pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | WorkerError | LostPeers) or str(function.__module__).startswith("braidrl."):
            raise
        code = getattr(function, "__code__", None)
        file = code.co_filename if isinstance(code, CodeType) else ""
        raise UserError(
            f"{name} raised {type(error).__name__}: {first_line(error)} ({where_raised(error, file)}); mend the "
            "function"
        ) from error


def shown(value: Any) -> str:
    """Return a value for a message: one line without control characters; long values are shortened in the middle."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = SHOWN
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    return " ".join(line.strip() for line in short.repr(value).splitlines())

"""The inside of a process: it does the task that arrives over the connection, and reports the outcome."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any, NoReturn

from braidrl.cluster.process import BEAT_S, Failure, Outcome, ProcessSpec
from braidrl.cluster.watchdog import named
from braidrl.data.messages import pack_message, unpack_message
from braidrl.errors import BadUpdate, FailedStep, LostPeers, UserError, limit_reached, no_room
from braidrl.observe.stalls import WORK

FAILED = 1
SPEAKING = threading.Lock()
at_end: list[Callable[[], None]] = []
"""Callbacks that run before a process without a parent ends: they end the processes that it started."""


class TaskFailed(Exception):
    """Raised by a task that can describe its failure better than the process, with a `Failure`."""


def main(descriptor: int) -> NoReturn:
    """Do the first task that arrives over the connection at a file descriptor.

    The process ends after the task, or when the parent has ended.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    task = unpack_message(connection.recv_bytes(), ProcessSpec)
    named(task.name)
    threading.Thread(target=end_with, args=(connection, task), daemon=True).start()
    threading.Thread(target=beat, args=(connection,), daemon=True).start()
    # A Ray thread that blocks these signals may have started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failure: Failure | None = None
    result: Any = None
    try:
        result = resolve_name(task.entry)(task.arguments)
    except BaseException as error:
        failure = error.args[0] if isinstance(error, TaskFailed) else failure_of(f"{task.name} failed", error)
    # The last message, after success or failure; the parent may have ended.
    with contextlib.suppress(OSError), SPEAKING:
        connection.send_bytes(pack_message(Outcome(result, failure)))
    exit_now(FAILED if failure else 0)


def beat(connection: Connection) -> None:
    """Send a heartbeat each second, with a stalled piece of work if there is one, until the parent stops reading."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            with SPEAKING:
                if select.select((), [connection], (), 0)[1]:
                    connection.send_bytes(pack_message(WORK.stalled()))


def failure_of(where: str, error: BaseException) -> Failure:
    """Describe an error: where it happened, in one line, and the traceback."""
    if isinstance(error, UserError):
        kinds = {BadUpdate: "update", FailedStep: "step"}
        return Failure(kinds.get(type(error), "user"), str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", "")
    if full := no_room(error, "RUN") or limit_reached(error):
        return Failure("user", f"{where}: {full}")
    text = "".join(traceback.format_exception(error)).rstrip()
    kind = f"{type(error).__name__}: {error}".splitlines()[0]
    return Failure("error", f"{where}: {kind}\n{text}", follows=isinstance(error, LostPeers))


def end_with(connection: Connection, task: ProcessSpec) -> None:
    """End this process when the parent's end of the connection closes, even if the main thread is blocked."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    try:
        if task.orphaned:
            resolve_name(task.orphaned)(task.arguments)
    finally:
        exit_now()


def exit_now(status: int = FAILED) -> NoReturn:
    """End the processes started here, then this process, without waiting for stuck ranks or library threads."""
    try:
        for call in at_end:
            call()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)

"""The process that imports untrusted code and answers requests to it, in copies of itself or in itself.

-> {"entry": "module:function", "arguments", "limits", "seconds"}
-> HERE and the end of a socket      this process answers its requests, and does nothing else meanwhile
-> APART and the end of a socket     a sandboxed copy of this process answers its requests (`copies.py`)
-> LISTEN                            <- a socket to serve agents on, in this process's network

A socket carries {method: argument}, a line each, and answers. When the other end closes, its session ends; so does this
process with the run.
"""

import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import struct
import sys
import traceback
from functools import partial

from braidrl.sandbox.answers import Answerer, Message
from braidrl.sandbox.copies import SandboxedCopies, SandboxLimits

LISTEN, HERE, APART = b"N", b"H", b"A"
LOAD_LIMIT_S = 120.0
"""Seconds to start Python and import the code on a busy machine; the time limit of a call begins afterwards."""
ORPHAN_GRACE_S = 3.0


def main(descriptor: int) -> None:
    """Serve the connection at a file descriptor until the other end closes."""
    os.set_inheritable(descriptor, False)
    # A stopped process continues, and so can end, when anything arrives, including the run's end.
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ConnectionError, struct.error), socket.socket(fileno=descriptor) as run:
        # As multiprocessing's connections send it; that package is not loaded here, because each page of this process
        # is copied.
        (size,) = struct.unpack("!i", run.recv(4, socket.MSG_WAITALL))
        setup = json.loads(run.recv(size, socket.MSG_WAITALL))
        module, _, function = setup["entry"].partition(":")
        answer: Answerer = getattr(importlib.import_module(module), function)(**setup["arguments"])
        serve(run, answer, setup["seconds"], SandboxLimits(**setup["limits"]) if setup["limits"] else None)
    os.killpg(0, signal.SIGKILL)


def serve(run: socket.socket, answer: Answerer, seconds: float, limits: SandboxLimits | None) -> None:
    """Execute the run's requests one after the other; copies run concurrently."""

    def serve_copy(end: socket.socket) -> None:
        os.register_at_fork(after_in_child=partial(cut_off, end.fileno()))
        with contextlib.suppress(ConnectionError):  # the run no longer waits for the answer
            answer_all(answer, end)

    copies = SandboxedCopies(run, serve_copy, limits) if limits else None
    while True:
        while copies and run.fileno() not in copies.watch_once():
            continue  # until a request, or the end of the run
        request, ends, _, _ = socket.recv_fds(run, 1, 1)
        for end in ends:
            # Programs that the code starts must not inherit its end of a session: they could answer in its place.
            os.set_inheritable(end, False)
        if request == LISTEN:
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.send_fds(run, [LISTEN], [server.fileno()])
        elif request == HERE:
            with socket.socket(fileno=ends[0]) as session:
                answer_all(answer, session, seconds + ORPHAN_GRACE_S)
            gc.collect()
            gc.freeze()  # pages that no collection touches are shared with the copies
        elif request == APART and copies:
            copies.start(socket.socket(fileno=ends[0]))
        else:
            break
    if copies:
        copies.end_all()


def answer_all(answer: Answerer, end: socket.socket, seconds: float | None = None) -> None:
    """Answer each request; an exception is an answer too.

    If an answer takes longer than `seconds`, the kernel ends this process.
    """
    runner = None
    with end.makefile("rb") as lines:
        for line in lines:
            ((method, argument),) = json.loads(line).items()
            if seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S if method == "load" else seconds)
            try:
                result = answer(method, argument)
                if inspect.isawaitable(result):
                    import asyncio

                    runner = runner or asyncio.Runner()
                    result = runner.run(result)
                sys.stdout.flush()  # the host shows a copy's output at its end
                message = json.dumps(result)
            except raised() as error:
                message = json.dumps(failure_of(error))
            if seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            end.sendall(message.encode() + b"\n")


def cut_off(descriptor: int) -> None:
    """Replace a descriptor in processes that the code forks, so that only the code's first process answers."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def raised() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the code that do not end its process; call it after an exception.

    asyncio's CancelledError is included only if the code imported asyncio, whose import is slow for short-lived
    processes.
    """
    asyncio = sys.modules.get("asyncio")
    return (Exception, SystemExit, *([asyncio.CancelledError] if asyncio else []))


def failure_of(error: BaseException) -> Message:
    """Return an exception as a failure: its type, its text, and its location in the code. An exception group gives its
    first exception.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return {"failure": type(error).__name__, "detail": str(error)[:500], "where": where}

"""The process that imports untrusted code and answers requests to it, in a forked copy for each call or trajectory, or in itself.

-> {"entry": "module:function", "arguments", "limits", "seconds", "together"}
-> LOAD and the end of a socket      this process answers its requests, and does nothing else meanwhile
-> PLAY and the end of a socket      a sandboxed copy of this process answers its requests, or, `together`, this process beside others
-> LISTEN                            <- a socket to serve agents on, in this process's network

A socket carries {method: argument}, a line each, and answers. When the other end closes, its talk ends; so does this process with the run.
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
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection

from braidrl.sandbox.answers import Answerer
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, Message, SandboxLimits, raised, supervised_talk, write_message

LISTEN, LOAD, PLAY = b"N", b"L", b"P"
ORPHAN_GRACE_S, HEARTBEAT_S = 3.0, 0.5


def main(descriptor: int) -> None:
    """Serve the connection at a file descriptor until its other end is gone."""
    os.set_inheritable(descriptor, False)
    # A stopped process continues, and so can end, when anything arrives, including the run's end.
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    line = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        asked = json.loads(line.recv_bytes())
        module, _, function = asked["entry"].partition(":")
        answer: Answerer = getattr(importlib.import_module(module), function)(**asked["arguments"])
        with socket.socket(fileno=os.dup(descriptor)) as run:
            line.close()
            if asked["together"]:
                serve_together(run, answer, asked["seconds"])
            else:
                serve(run, answer, asked["seconds"], SandboxLimits(**asked["limits"]) if asked["limits"] else None)
    os.killpg(0, signal.SIGKILL)


def serve(run: socket.socket, answer: Answerer, seconds: float, limits: SandboxLimits | None) -> None:
    """Execute the run's requests; a copy's supervisor ends with its socket, not with this process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if limits is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    while True:
        asked, ends, _, _ = socket.recv_fds(run, 1, 1)
        if not asked:
            return
        if asked == LISTEN:
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.send_fds(run, [LISTEN], [server.fileno()])
        elif asked == LOAD:
            with socket.socket(fileno=ends[0]) as end:
                answer_all(answer, end.fileno(), end.fileno(), seconds)
            gc.collect()
            gc.freeze()
        elif limits is not None and os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()  # a signal to the host's group must not end this process before the code
                run.close()
                supervised_talk(partial(answer_all, answer), limits, socket.socket(fileno=ends[0]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        else:
            os.close(ends[0])


def answer_all(answer: Answerer, requests: int, answers: int, seconds: float | None = None) -> None:
    """Answer each request, also with an exception. If an answer takes longer than `seconds`, the kernel ends this process."""
    runner = None
    with open(requests, "rb", closefd=False) as lines:
        for line in lines:
            ((method, argument),) = json.loads(line).items()
            if seconds is not None:
                end_after(LOAD_LIMIT_S if method == "load" else seconds + ORPHAN_GRACE_S)
            try:
                found = answer(method, argument)
                if inspect.isawaitable(found):
                    # Imported here: it takes longer to load than everything else that an ordinary function needs.
                    import asyncio

                    runner = runner or asyncio.Runner()
                    found = runner.run(awaited(found))
                sys.stdout.flush()  # the supervisor shows its output at its end
            except raised() as error:
                found = failure_of(error)
            if seconds is not None:
                end_after(0)
            write_message(answers, found)


async def awaited(found: object) -> Message:
    message: Message = await found  # type: ignore[misc]
    return message


def failure_of(error: BaseException) -> Message:
    """Return an exception as a failure: its type, its text, and its location in the code."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in place)
    return {"failure": type(error).__name__, "detail": str(error)[:500], "where": where}


def serve_together(run: socket.socket, answer: Answerer, seconds: float) -> None:
    """Answer one request of each socket, all concurrently on an event loop.

    The kernel ends this process if its event loop is blocked for longer than the limit of an answer, `seconds`, or of an import. Normally
    the run kills it earlier, but the run may be gone.
    """
    import asyncio

    async def serve_all() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        tasks = set[asyncio.Task[None]]()

        def on_asked() -> None:
            asked, ends, _, _ = socket.recv_fds(run, 1, 1)
            if not asked:
                ended.set()
                return
            task = loop.create_task(talk(ends[0]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def talk(end: int) -> None:
            reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=end), limit=1 << 30)
            try:
                ((method, argument),) = json.loads(await reader.readline()).items()
                gone = asyncio.ensure_future(reader.read(1))
                made = asyncio.ensure_future(answered(method, argument))
                await asyncio.wait((gone, made), return_when=asyncio.FIRST_COMPLETED)
                if made.done():
                    writer.write(json.dumps(made.result()).encode() + b"\n")
                    await writer.drain()
                made.cancel()
                gone.cancel()
            except ConnectionError:
                return
            finally:
                writer.close()

        async def answered(method: str, argument: object) -> Message:
            end_after(LOAD_LIMIT_S if method == "load" else seconds + ORPHAN_GRACE_S)
            try:
                found = answer(method, argument)
                made: Message = await found if inspect.isawaitable(found) else found
                return made
            except raised() as error:
                return failure_of(error)

        async def beat() -> None:
            while True:
                end_after(seconds + ORPHAN_GRACE_S)
                await asyncio.sleep(HEARTBEAT_S)

        tasks.add(loop.create_task(beat()))
        loop.add_reader(run.fileno(), on_asked)
        await ended.wait()

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    asyncio.run(serve_all())


def end_after(seconds: float) -> None:
    """Make the kernel end this process after so many seconds; the next call replaces this one."""
    signal.setitimer(signal.ITIMER_REAL, seconds)

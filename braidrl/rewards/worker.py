"""The process that calls verifiers: it gets JSON over a pipe and answers in JSON, until the pipe ends.

-> {"load": key, "concurrent", "limit_s", "limits"}             <- {}, or a failure
-> {"call", "key", "completion", "limit_s"}           <- {"call", "score", "correct"}, or {"call", "failure", "detail"}

One at a time, an ordinary function may block as it likes. Concurrently, the calls of one `async` function share an event loop
(`concurrent_calls.py`).
"""

import inspect
import json
import math
import os
import reprlib
import signal
import traceback
from collections.abc import Awaitable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rewards.verifiers import Score
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, SandboxLimits, raised, sandboxed

Message = dict[str, Any]
ORPHAN_GRACE_S = 3.0
"""How much later than its limit a call ends that nobody is there to kill."""


def main(descriptor: int) -> None:
    """Serve the pipe at a file descriptor; when its other end is gone, end this process and all that it started."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    verifiers: dict[str, Verifier] = {}
    limits: SandboxLimits | None = None
    try:
        while True:
            message = receive(connection)
            if "load" in message:
                failed = load(message["load"], verifiers)
                limits = SandboxLimits(**message["limits"]) if message["limits"] else None
                send(connection, failed)
                if message["concurrent"] and not failed:
                    # Imported here, as in `result_of`: asyncio takes longer to load than all else that an ordinary function needs.
                    from braidrl.rewards.concurrent_calls import serve

                    serve(connection, verifiers, message["limit_s"])
            else:
                answer = _call_alone(verifiers[message["key"]], message, limits)
                send(connection, {"call": message["call"], **answer})
    except (EOFError, ConnectionError):
        os.killpg(0, signal.SIGKILL)


def die_after(seconds: float) -> None:
    """Have the kernel end this process if it is still busy after so many seconds; 0 cancels that.

    The parent kills what takes too long. If the parent is dead, this works even in code that never releases Python's lock.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def encode(message: Message) -> bytes:
    return json.dumps(message).encode()


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(encode(message))


def receive(connection: Connection) -> Message:
    message: Message = json.loads(connection.recv_bytes())
    return message


def load(key: str, verifiers: dict[str, Verifier]) -> Message:
    """Add the verifier of that key; returns the failure in importing it, if any."""
    die_after(LOAD_LIMIT_S + ORPHAN_GRACE_S)
    try:
        name, settings = json.loads(key)
        verifiers[key] = resolve(name, settings)
    except raised() as error:
        return failure_of(error)
    finally:
        die_after(0)
    return {}


def _call_alone(verifier: Verifier, message: Message, limits: SandboxLimits | None) -> Message:
    if limits is not None and not verifier.trusted:
        return sandboxed(lambda: call_here(verifier, message), limits)
    die_after(message["limit_s"] + ORPHAN_GRACE_S)
    try:
        return call_here(verifier, message)
    finally:
        die_after(0)


def call_here(verifier: Verifier, message: Message) -> Message:
    """Call a verifier in this process and thread; return its answer, or how it failed."""
    try:
        value = verifier(message["completion"])
        return judgement(result_of(value) if inspect.isawaitable(value) else value)
    except raised() as error:
        return failure_of(error)


def result_of(awaitable: Awaitable[Any]) -> Any:
    """Return what an awaitable gives that came from a function which is not declared `async`."""
    from braidrl.cluster.event_loop import Runner  # only here: most verifiers need no event loop

    async def wait() -> Any:
        return await awaitable

    with Runner() as runner:
        return runner.run(wait())


def judgement(value: Any) -> Message:
    """Normalise a verifier's result to `score` and `correct`, None where it left one open; anything else is a failure."""
    metrics: Mapping[str, float] = {}
    if isinstance(value, Score):
        score, correct, metrics = plain_number(value.score), value.correct, value.metrics
    else:
        score, correct = plain_number(value), None
    if isinstance(score, bool):
        return {"score": None, "correct": score}
    if isinstance(score, int | float) and math.isfinite(score):
        more = {"metrics": dict(metrics)} if metrics else {}
        return {"score": float(score), "correct": None if correct is None else bool(correct), **more}
    return {
        "failure": "result",
        "detail": f"returned {reprlib.repr(value)}; a verifier returns a bool, a finite number or Score",
    }


def plain_number(value: Any) -> Any:
    """Convert a NumPy or torch scalar to a Python number; return other values as they are."""
    return value.item() if callable(getattr(value, "item", None)) else value


def failure_of(error: BaseException) -> Message:
    """Describe an exception in one line: what, and where in whose code."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in place)
    return {"failure": "exception", "detail": f"{type(error).__name__}: {error}"[:500] + where}

"""Answers of verifiers in the process that imported them: `sandbox/host.py` calls `checks`, and its result for each request.

-> {"load": key}                                  <- {}, or a failure
-> {"check": {"key", "completion", "limit_s"}}    <- {"score", "correct", "metrics"}, or {"failure", "detail"}
"""

import inspect
import json
import math
import reprlib
from collections.abc import Awaitable, Mapping
from typing import Any

from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rewards.verifiers import Score
from braidrl.sandbox.answers import Answerer
from braidrl.sandbox.host import failure_of
from braidrl.sandbox.sandbox import Message, raised


def checks() -> Answerer:
    """Return the answerer of a pool's requests."""
    verifiers: dict[str, Verifier] = {}

    def answer(method: str, argument: Any) -> Message | Awaitable[Message]:
        if method == "load":
            name, settings = json.loads(argument)
            try:
                verifiers[argument] = resolve(name, settings)
            except raised() as error:
                return failed(error)
            return {}
        return call(verifiers[argument["key"]], argument)

    return answer


def call(verifier: Verifier, argument: Mapping[str, Any]) -> Message | Awaitable[Message]:
    """Return a verifier's answer or failure; for an `async` verifier an awaitable of it."""
    try:
        value = verifier(argument["completion"])
        return finished(value, argument["limit_s"]) if inspect.isawaitable(value) else judgement(value)
    except raised() as error:
        return failed(error)


def call_here(verifier: Verifier, argument: Mapping[str, Any]) -> Message:
    """Call a verifier that is not declared `async` in this process and thread."""
    found = call(verifier, argument)
    if not inspect.isawaitable(found):
        return found
    from braidrl.cluster.event_loop import Runner  # only here: most verifiers need no event loop

    async def wait() -> Message:
        return await found

    with Runner() as runner:
        return runner.run(wait())


async def finished(value: Awaitable[Any], limit_s: float) -> Message:
    """Await a verifier's result within its limit."""
    import asyncio

    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            return judgement(await value)
    except raised() as error:
        if deadline.expired():
            return {"failure": "timeout", "detail": f"no answer within {limit_s:g} s"}
        return failed(error)


def failed(error: BaseException) -> Message:
    """Describe an exception in one line: its type, its text, and its location in the code."""
    found = failure_of(error)
    where = f" ({found['where']})" if found["where"] else ""
    return {"failure": "exception", "detail": f"{found['failure']}: {found['detail']}{where}"}


def judgement(value: Any) -> Message:
    """Normalise a verifier's result to `score` and `correct`, None if not given; anything else is a failure."""
    metrics: Mapping[str, float] = {}
    if isinstance(value, Score):
        score, correct, metrics = plain_number(value.score), value.correct, value.metrics
    else:
        score, correct = plain_number(value), None
    if isinstance(score, bool):
        return {"score": None, "correct": score}
    if isinstance(score, int | float) and math.isfinite(score):
        more = {"metrics": {name: plain_number(one) for name, one in metrics.items()}} if metrics else {}
        return {"score": float(score), "correct": None if correct is None else bool(correct), **more}
    return {
        "failure": "result",
        "detail": f"returned {reprlib.repr(value)}; a verifier returns a bool, a finite number or Score",
    }


def plain_number(value: Any) -> Any:
    """Convert a NumPy or torch scalar to a Python number; return other values as they are."""
    return value.item() if callable(getattr(value, "item", None)) else value

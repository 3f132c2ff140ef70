"""Verifiers by name with settings, checked against the function's signature before anything runs; and their calls.

The run resolves a verifier to check it. The process of `sandbox/host.py` resolves it again and answers, by `checks`:

-> {"load": key}                                  <- {}, or a failure
-> {"check": {"key", "completion", "limit_s"}}    <- {"score", "correct", "metrics"}, or {"failure", "detail"}
"""

import inspect
import json
import math
import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from braidrl.errors import UserError, suggest
from braidrl.importing import relative_to, source_of
from braidrl.rewards.verifiers import VERIFIERS, Score
from braidrl.sandbox.answers import Answerer, Message
from braidrl.sandbox.host import failure_of, raised

KNOWN_PARAMETERS = ("prompt", "response", "answer", "metadata", "source")


@dataclass(frozen=True)
class Completion:
    """One answer to check, all JSON, because it is sent to another process."""

    prompt: Any
    """Text, or chat messages."""
    response: str
    answer: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the example."""
    source: str = ""


@dataclass(frozen=True, eq=False)
class Verifier:
    """A verifier's function and its settings."""

    name: str
    settings: Mapping[str, Any]
    function: Callable[..., Any]
    reads: tuple[str, ...]
    asynchronous: bool

    @cached_property
    def key(self) -> str:
        """Return the name and settings as JSON, from which another process makes the same verifier."""
        return json.dumps([relative_to(Path.cwd(), self.name), self.settings], sort_keys=True)

    @property
    def trusted(self) -> bool:
        """Return whether it may run outside a sandbox: it belongs to Braid and runs no foreign code."""
        return self.name in VERIFIERS and self.name != "code"

    @property
    def file(self) -> Path | None:
        """Return the file of a user's function."""
        return None if self.name in VERIFIERS else source_of(self.name)

    @property
    def label(self) -> str:
        """Return the short name in metrics and columns: `judge` of `file.py:judge`."""
        return self.name.rpartition(":")[2]

    def __call__(self, completion: Mapping[str, Any]) -> Any:
        """Call the function with a completion's fields, and return its result; an awaitable if it is `async`."""
        return self.function(**{name: completion[name] for name in self.reads}, **self.settings)


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Verifier:
    """Return the built-in verifier of that name, or the user's `module:function` or `file.py:function`.

    Raises UserError if there is none, or if parameters and settings do not match.
    """
    settings = dict(settings or {})
    function = VERIFIERS.find(name)
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        raise UserError(f"verifier {name!r}: its parameters cannot be read; write it as a Python function") from None
    for parameter in parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise UserError(f"verifier {name!r}: {parameter} cannot be given by name; write plain named parameters")
    reads = tuple(p for p in KNOWN_PARAMETERS if p in parameters)
    _check_settings(name, settings, {n: p for n, p in parameters.items() if n not in reads})
    if name in VERIFIERS and (pattern := settings.get("pattern")) is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise UserError(f"verifier {name!r}: `pattern` {pattern!r} is no regular expression: {error}") from None
    asynchronous = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Verifier(name, settings, function, reads, asynchronous)


def _check_settings(name: str, settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise UserError for a setting without a parameter, or a parameter without a value."""
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for setting in settings:
        if setting in KNOWN_PARAMETERS:
            raise UserError(f"verifier {name!r}: {setting!r} comes from the row; take it out of `params`")
        if setting not in named and not any_name:
            raise UserError(f"verifier {name!r} has no setting {setting!r}. {suggest(setting, named)}")
    for missing in (n for n, p in named.items() if p.default is p.empty and n not in settings):
        raise UserError(
            f"verifier {name!r}: parameter {missing!r} is none of {', '.join(KNOWN_PARAMETERS)}; "
            f"give it a default or set it, as in `params: {{{missing}: ...}}`"
        )
    try:
        json.dumps(settings)
    except TypeError as error:
        raise UserError(f"verifier {name!r}: `params` must be plain YAML values ({error})") from None


def checks() -> Answerer:
    """Return the answerer of a pool's requests."""
    verifiers: dict[str, Verifier] = {}

    def answer(method: str, argument: Any) -> Message | Awaitable[Message]:
        if method == "load":
            name, settings = json.loads(argument)
            try:
                verifiers[argument] = resolve(name, settings)
                if verifiers[argument].asynchronous:
                    import asyncio  # noqa: F401 (copies of this process then need not)
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

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
from pathlib import Path
from typing import Any

from braidrl.errors import UserError, first_line, suggest
from braidrl.importing import import_function, relative_to
from braidrl.rewards.verifiers import VERIFIERS, Score
from braidrl.sandbox.answers import Answerer, Answering, Message
from braidrl.sandbox.host import failure_of, raised

READERS = {"code": "braidrl.rewards.cases:cases_of"}
"""Functions that read the reference answers of a verifier, (answer, metadata), and raise ValueError for one that is of
no use.
"""
KNOWN_PARAMETERS = ("prompt", "response", "answer", "metadata", "source")


@dataclass(frozen=True)
class Completion:
    """One answer to check, in JSON values, because it is sent to another process."""

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
    key: str
    """The name and settings as JSON, from which another process makes the same verifier."""
    label: str
    """The short name in metrics and columns: `judge` of `file.py:judge`; of two of a source, the second is `judge_2`.
    """
    function: Callable[..., Any]
    reads: tuple[str, ...]
    asynchronous: bool
    weight: float = 1.0

    @property
    def needs_answer(self) -> bool:
        """Return True if the function cannot be called without a reference answer."""
        answer = inspect.signature(self.function).parameters.get("answer")
        return "answer" in self.reads and answer is not None and answer.default is inspect.Parameter.empty

    def unusable(self, answer: Any, metadata: Mapping[str, Any]) -> str:
        """Return why a reference answer is unusable; empty if it is usable, or if the verifier cannot decide."""
        if self.name not in READERS:
            return ""
        try:
            import_function(READERS[self.name])(answer, metadata)
        except ValueError as error:
            return first_line(error)
        return ""

    def __call__(self, completion: Mapping[str, Any]) -> Any:
        """Call the function with a completion's fields, and return its result; an awaitable if it is `async`."""
        return self.function(**{name: completion[name] for name in self.reads}, **self.settings)


def resolve(name: str, settings: Mapping[str, Any] | None = None) -> Verifier:
    """Return the built-in verifier of that name, or the user's `module:function` or `file.py:function`.

    Raises UserError if there is none, for a setting without a parameter, a parameter without a value, or a value of the
    wrong type.
    """
    settings = dict(settings or {})
    function = VERIFIERS.find(name)
    if isinstance(function, type):
        raise UserError(f"verifier {name!r} is a class; name a function, or an instance that is called like one")
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        raise UserError(f"verifier {name!r}: its parameters cannot be read; write it as a Python function") from None
    for parameter in parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise UserError(f"verifier {name!r}: {parameter} cannot be given by name; write plain named parameters")
    reads = tuple(p for p in KNOWN_PARAMETERS if p in parameters)
    settable = {n: p for n, p in parameters.items() if n not in reads}
    named = {n: p for n, p in settable.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    takes_any = len(named) < len(settable)
    for setting in settings:
        if setting in KNOWN_PARAMETERS:
            raise UserError(f"verifier {name!r}: {setting!r} comes from the row; take it out of `params`")
        if setting not in named and not takes_any:
            raise UserError(f"verifier {name!r} has no setting {setting!r}. {suggest(setting, named)}")
    for missing in (n for n, p in named.items() if p.default is p.empty and n not in settings):
        raise UserError(
            f"verifier {name!r}: parameter {missing!r} is none of {', '.join(KNOWN_PARAMETERS)}; "
            f"give it a default or set it, as in `params: {{{missing}: ...}}`"
        )
    try:
        key = json.dumps([relative_to(Path.cwd(), name), settings], sort_keys=True)
    except TypeError as error:
        raise UserError(f"verifier {name!r}: `params` must be plain YAML values ({error})") from None
    if name in VERIFIERS and (pattern := settings.get("pattern")) is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise UserError(f"verifier {name!r}: `pattern` {pattern!r} is no regular expression: {error}") from None
    asynchronous = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Verifier(name, settings, key, name.rpartition(":")[2], function, reads, asynchronous)


def checks() -> Answerer:
    """Return the answerer of a pool's requests."""
    verifiers: dict[str, Verifier] = {}

    def answer(method: str, argument: Any) -> Message | Answering:
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


def call(verifier: Verifier, argument: Mapping[str, Any]) -> Message | Answering:
    """Return a verifier's answer or failure; for an `async` verifier a coroutine that returns it."""
    try:
        value = verifier(argument["completion"])
        return finished(value, argument["limit_s"]) if inspect.isawaitable(value) else judgement(value)
    except raised() as error:
        return failed(error)


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
    failure = failure_of(error)
    where = f" ({failure['where']})" if failure["where"] else ""
    return {"failure": "exception", "detail": f"{failure['failure']}: {failure['detail']}{where}"}


def judgement(value: Any) -> Message:
    """Normalise a verifier's result to `score` and `correct`, None if missing; any other result is a failure."""
    result = value if isinstance(value, Score) else Score(value)
    values: list[Any] = [result.score, *result.metrics.values()]
    # NumPy's and torch's scalars become Python's numbers.
    score, *numbers = [v.item() if callable(getattr(v, "item", None)) else v for v in values]
    if isinstance(score, bool):
        return {"score": None, "correct": score}
    if not isinstance(score, int | float) or not math.isfinite(score):
        detail = f"returned {reprlib.repr(value)}; a verifier returns a bool, a finite number or Score"
        return {"failure": "result", "detail": detail}
    correct = None if result.correct is None else bool(result.correct)
    metrics = dict(zip(result.metrics, numbers, strict=True))
    return {"score": float(score), "correct": correct, **({"metrics": metrics} if metrics else {})}

"""Verifiers by name with settings, which are checked against the function's signature before anything runs."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from braidrl.errors import UserError, suggest
from braidrl.importing import relative_to, source_of
from braidrl.rewards.verifiers import VERIFIERS

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
    parameters = _parameters(name, function)
    reads = tuple(p for p in KNOWN_PARAMETERS if p in parameters)
    _check_settings(name, settings, {n: p for n, p in parameters.items() if n not in reads})
    if name in VERIFIERS and settings.get("pattern") is not None:
        _check_pattern(name, settings["pattern"])
    asynchronous = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Verifier(name, settings, function, reads, asynchronous)


def _parameters(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        raise UserError(f"verifier {name!r}: its parameters cannot be read; write it as a Python function") from None
    for parameter in parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise UserError(f"verifier {name!r}: {parameter} cannot be given by name; write plain named parameters")
    return dict(parameters)


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


def _check_pattern(name: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"verifier {name!r}: `pattern` {pattern!r} is no regular expression: {error}") from None

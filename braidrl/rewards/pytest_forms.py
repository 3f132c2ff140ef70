"""The parts of pytest that tests in its form use: `raises`, `approx`, `mark.parametrize`, `fixture`, `fail`, `skip`.

Braid does not need pytest, and does not start it for each call.
"""

import inspect
import itertools
import math
import re
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any


class Raised:
    """The exception that `raises` has caught."""

    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        return type(self.value)

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)!r}"
        return True


@contextmanager
def expecting(kind: Any, match: str | None = None) -> Iterator[Raised]:
    raised = Raised()
    try:
        yield raised
    except kind as error:
        raised.value = error
        if match is not None:
            raised.match(match)
    else:
        raise AssertionError(f"no {kind} was raised")


def raises(kind: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    """Expect an exception in a `with` block, or in a call."""
    if not call:
        return expecting(kind, match)
    with expecting(kind, match) as raised:
        call[0](*call[1:], **named)
    return raised


class Approx:
    """A value that equals nearby values: numbers, and sequences, arrays and mappings of numbers."""

    __array_ufunc__ = None
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, other: Any) -> bool:
        return self._near(self.expected, other)

    def _near(self, expected: Any, actual: Any) -> bool:
        expected, actual = (v.tolist() if hasattr(type(v), "tolist") else v for v in (expected, actual))
        if isinstance(expected, Mapping):
            same = isinstance(actual, Mapping) and expected.keys() == actual.keys()
            return same and all(self._near(value, actual[key]) for key, value in expected.items())
        if isinstance(expected, list | tuple):
            same = isinstance(actual, list | tuple) and len(expected) == len(actual)
            return same and all(map(self._near, expected, actual))
        if isinstance(expected, str | bool | None) or isinstance(actual, str | bool | None):
            return bool(expected == actual)
        if expected == actual:
            return True
        if any(map(math.isnan, (abs(expected), abs(actual)))):
            return self.nan_ok and math.isnan(abs(expected)) and math.isnan(abs(actual))
        relative = (0.0 if self.abs is not None else 1e-6) if self.rel is None else self.rel
        near = max(relative * abs(expected), 1e-12 if self.abs is None else self.abs)
        return not math.isinf(abs(actual)) and bool(abs(expected - actual) <= near)


class Marks:
    """Decorators of tests; only `parametrize` and `skip` have an effect here."""

    def __getattr__(self, name: str) -> Any:
        def mark(*arguments: Any, **named: Any) -> Any:
            if (
                len(arguments) == 1
                and not named
                and (inspect.isfunction(arguments[0]) or inspect.isclass(arguments[0]))
            ):
                return marked((name, (), {}), arguments[0])
            return partial(marked, (name, arguments, named))

        return mark


def marked(mark: tuple[str, Any, Any], test: Any) -> Any:
    test.braid_marks = [*getattr(test, "braid_marks", ()), mark]
    return test


def fixture(*arguments: Any, **_: Any) -> Any:
    """Mark a function as the source of an argument."""
    if not arguments:
        return fixture
    arguments[0].braid_fixture = True
    return arguments[0]


def fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def skip(reason: str = "", **_: Any) -> None:
    raise unittest.SkipTest(reason)


class Pytest(SimpleNamespace):
    """The module that a test gets as `pytest`."""

    def __init__(self) -> None:
        super().__init__(raises=raises, approx=Approx, mark=Marks(), fixture=fixture, fail=fail, skip=skip)
        self.param = lambda *values, **_: values if len(values) > 1 else values[0]
        self.main = lambda *_, **__: 0

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"tests may use pytest's {', '.join(vars(self))}, not its {name}")


def calls_of(test: Any, defined: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield the calls of a test function, or of the tests of a class, one for each of its parameters."""
    if any(name in ("skip", "xfail") for name, _, _ in getattr(test, "braid_marks", ())):
        return
    if inspect.isclass(test):
        for name in [name for name in vars(test) if name.startswith("test")]:
            method = vars(test)[name]
            for values in parameters([*getattr(test, "braid_marks", ()), *getattr(method, "braid_marks", ())]):
                yield partial(called_in_class, test, name, values, defined)
    else:
        for values in parameters(getattr(test, "braid_marks", ())):
            yield partial(called, test, values, defined)


def called_in_class(kind: type, name: str, values: dict[str, Any], defined: Mapping[str, Any]) -> Any:
    """Call one test of a class, in a new instance."""
    instance: Any = kind()
    for prepare in ("setup_class", "setup_method", "setup"):
        if hasattr(instance, prepare):
            function = getattr(instance, prepare)
            function(*[getattr(instance, name)] * len(inspect.signature(function).parameters))
    fixtures = {key: getattr(instance, key) for key, member in vars(kind).items() if hasattr(member, "braid_fixture")}
    result = called(getattr(instance, name), values, {**defined, **fixtures})
    if hasattr(instance, "teardown_method"):
        function = instance.teardown_method
        function(*[getattr(instance, name)] * len(inspect.signature(function).parameters))
    return result


def called(test: Callable[..., Any], values: dict[str, Any], defined: Mapping[str, Any]) -> Any:
    """Call a function with its parameters and fixtures."""
    names = inspect.signature(test).parameters
    arguments = {name: values[name] if name in values else made(name, defined) for name in names}
    return test(**arguments)


def made(name: str, defined: Mapping[str, Any]) -> Any:
    """Return the value of a fixture. Raises ImportError if the test defines none of that name."""
    source: Any = defined.get(name)
    if not hasattr(source, "braid_fixture"):
        raise ImportError(f"the test asks for a fixture {name!r}, and defines none")
    value = called(source, {}, defined)
    return next(value) if inspect.isgenerator(value) else value


def parameters(marks: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call that `mark.parametrize` requests."""
    sets = []
    for _, arguments, named in (mark for mark in marks if mark[0] == "parametrize"):
        names, values = [*arguments, *(named[key] for key in ("argnames", "argvalues") if key in named)][:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        sets.append([dict(zip(names, [row] if len(names) == 1 else row, strict=True)) for row in values])
    for chosen in itertools.product(*sets):
        yield {name: value for call in chosen for name, value in call.items()}

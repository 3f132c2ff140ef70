"""The parts of pytest that tests in its form use: `raises`, `approx`, `mark.parametrize`, `fixture`, `fail`, `skip`.

Braid does not need pytest, and does not start it for each call.
"""

import importlib
import inspect
import io
import itertools
import math
import re
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple


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


def fixture(*arguments: Any, params: Sequence[Any] = (), autouse: bool = False, **_: Any) -> Any:
    """Mark a function as the source of an argument."""
    if not arguments:
        return partial(fixture, params=params, autouse=autouse)
    arguments[0].braid_fixture = SimpleNamespace(params=list(params), autouse=autouse)
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
    marks = getattr(test, "braid_marks", ())
    if any(name in ("skip", "xfail") for name, _, _ in marks):
        return
    if inspect.isclass(test):
        known = {**defined, **fixtures_in({name: getattr(test, name, None) for name in dir(test)})}
        for name in [name for name in dir(test) if name.startswith("test")]:
            function = getattr(test, name)
            for values in parameters([*marks, *getattr(function, "braid_marks", ())], sets_of(function, known)):
                yield partial(called_in_class, test, name, values, defined)
    else:
        for values in parameters(marks, sets_of(test, defined)):
            yield partial(called, test, values, defined)


def fixtures_in(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in members.items() if hasattr(member, "braid_fixture")}


def sets_of(test: Any, defined: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the parameters of each fixture with `params` that a test uses, also by way of another fixture."""
    sets, names, seen = [], [*wanted(test)], set[str]()
    while names:
        source: Any = defined.get(name := names.pop())
        if name in seen or not hasattr(source, "braid_fixture"):
            continue
        seen.add(name)
        names += wanted(source)
        if given := source.braid_fixture.params:
            sets.append([{f"{name} of request": value} for value in given])
    return sets


def wanted(test: Any) -> list[str]:
    """Return the names of the fixtures that a function asks for: parameters without defaults, and not those that
    `unittest.mock.patch` fills.
    """
    patched = sum(str(one.new) == "sentinel.DEFAULT" for one in getattr(test, "patchings", ()))
    parameters = inspect.signature(test).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    is_method = names[:1] == ["self"]
    return [*names[:is_method], *names[is_method + patched :]]


def called_in_class(kind: type, name: str, values: dict[str, Any], defined: Mapping[str, Any]) -> Any:
    """Call one test of a class, in a new instance."""
    instance: Any = kind()
    for prepare in ("setup_class", "setup_method", "setup"):
        if hasattr(instance, prepare) and not hasattr(getattr(instance, prepare), "braid_fixture"):
            function = getattr(instance, prepare)
            function(*[getattr(instance, name)] * len(inspect.signature(function).parameters))
    fixtures = fixtures_in({key: getattr(instance, key, None) for key in dir(kind)})
    result = called(getattr(instance, name), values, {**defined, **fixtures})
    if hasattr(instance, "teardown_method"):
        function = instance.teardown_method
        function(*[getattr(instance, name)] * len(inspect.signature(function).parameters))
    return result


def called(test: Callable[..., Any], values: dict[str, Any], defined: Mapping[str, Any]) -> Any:
    """Call a function with its parameters and fixtures, and run what a coroutine function returns."""
    marks = getattr(test, "braid_marks", ())
    used = [name for mark, names, _ in marks if mark == "usefixtures" for name in names]
    with ExitStack() as after:
        fixtures = Fixtures(values, defined, after)
        for name in [*(name for name, source in fixtures_in(defined).items() if source.braid_fixture.autouse), *used]:
            fixtures.value(name)
        result = test(**{name: fixtures.value(name) for name in wanted(test)})
        if inspect.iscoroutine(result):
            import asyncio  # here: few tests need it, and each call of a verifier would pay for it

            asyncio.run(result)


class Fixtures:
    """The fixtures of one test, each made once and closed after it."""

    def __init__(self, values: Mapping[str, Any], defined: Mapping[str, Any], after: ExitStack) -> None:
        """Take the test's parameters, the names of its module and what runs after it."""
        self.values, self.defined, self.after, self.made = values, defined, after, dict[str, Any]()

    def value(self, name: str) -> Any:
        """Return a parameter or the value of a fixture. Raises ImportError if the test defines none of that name."""
        if name in self.values:
            return self.values[name]
        if name not in self.made:
            self.made[name] = self.make(name)
        return self.made[name]

    def make(self, name: str) -> Any:
        source: Any = self.defined.get(name)
        if not hasattr(source, "braid_fixture"):
            if name in BUILT_IN:
                return self.after.enter_context(BUILT_IN[name]())
            raise ImportError(f"the test needs a fixture {name!r}, and defines none")
        request = SimpleNamespace(param=self.values.get(f"{name} of request"), addfinalizer=self.after.callback)
        arguments = {key: request if key == "request" else self.value(key) for key in wanted(source)}
        value = source(**arguments)
        if inspect.isgenerator(value):
            self.after.callback(next, value, None)
            return next(value)
        return value


class CaptureResult(NamedTuple):
    """The result of `capsys.readouterr`."""

    out: str
    err: str


class Captured:
    """pytest's `capsys`: what the test and the program print."""

    def __enter__(self) -> "Captured":
        self.kept = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self.kept

    def readouterr(self) -> Any:
        streams: list[Any] = [sys.stdout, sys.stderr]
        out, err = (stream.getvalue() for stream in streams)
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return CaptureResult(out, err)


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def patches() -> Iterator[Any]:
    """pytest's `monkeypatch`, of attributes and items of the test's own process."""
    from unittest import mock  # here: it imports asyncio

    with ExitStack() as undone:

        def set_attribute(target: Any, name: Any, value: Any = UNSET, raising: bool = True) -> None:
            if value is UNSET:
                (target, name), value = target.rsplit(".", 1), name
            target = importlib.import_module(target) if isinstance(target, str) else target
            undone.enter_context(mock.patch.object(target, name, value, create=not raising))

        def set_item(target: Any, name: Any, value: Any) -> None:
            undone.enter_context(mock.patch.dict(target, {name: value}))

        yield SimpleNamespace(setattr=set_attribute, setitem=set_item, undo=undone.close)


UNSET = object()
BUILT_IN: Mapping[str, Callable[[], Any]] = {
    "capsys": Captured,
    "capfd": Captured,
    "tmp_path": folder,
    "tmpdir": folder,
    "monkeypatch": patches,
}
"""pytest's own fixtures."""


def parameters(marks: Any, sets: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call that `mark.parametrize` and fixtures request."""
    for _, arguments, named in (mark for mark in marks if mark[0] == "parametrize"):
        names, values = [*arguments, *(named[key] for key in ("argnames", "argvalues") if key in named)][:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        sets.append([dict(zip(names, [row] if len(names) == 1 else row, strict=True)) for row in values])
    for chosen in itertools.product(*sets):
        yield {name: value for call in chosen for name, value in call.items()}

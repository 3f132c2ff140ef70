"""Runs a text of tests in Python: its asserts, and the tests that pytest, unittest and HumanEval would call.

text ──a count before each assertion──▶ execute ──▶ test_* functions, Test* classes, TestCases, check(candidate)

A test that passes without an assertion does not test the program, so it is refused.
"""

import ast
import builtins
import contextlib
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from braidrl.rewards.cases import AssertCase, asserting, parsed
from braidrl.rewards.crossing import Foreign
from braidrl.rewards.pytest_forms import Pytest, calls_of
from braidrl.rewards.subjects import PLACEHOLDERS, ImportsOfProgram, named_under_test

MODULE = "braid_test"
"""The name of a test's module, by which its own classes are known."""
COUNT, IS, TYPE = "__asserted__", "__is__", "__type__"


class TestStopped(BaseException):
    """The end of a test for another reason than its assertions; the test's `except` clauses do not catch it."""

    def __init__(self, reason: Exception | None) -> None:
        """Store the failure of the row, or None if the program is wrong."""
        super().__init__(str(reason))
        self.reason = reason


REACHED = ("builtins.input", "sys.stdin", "sys.stdout", "sys.stderr")
"""What a test can replace for the program too, by `patch` or `monkeypatch`."""


def replaced_in_vain(tree: ast.Module) -> str:
    """Return what a test replaces in its own process, while the program's keeps the original; empty text for none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, first = ast.unparse(node.func), node.args[0] if node.args else None
        if name.endswith(("patch.object", "patch.dict", "monkeypatch.setenv", "monkeypatch.delenv")):
            return ast.unparse(node)
        target = first.value if isinstance(first, ast.Constant) else None
        if isinstance(target, str) and name.rpartition(".")[2] in ("patch", "setattr") and target not in REACHED:
            return target
    return ""


def runs(case: AssertCase, peer: Any) -> bool:
    """Return whether a text of tests holds.

    Raises ValueError for a test that cannot be used, and Stopped.
    """
    held = holding(case, peer)
    if not held and (replaced := replaced_in_vain(parsed(case.text))):
        raise ValueError(f"a test cannot run here: it replaces {replaced[:80]}, which is in another process")
    return held


def holding(case: AssertCase, peer: Any) -> bool:
    """Execute a text of tests in this process, and return True if they pass; `peer` sends requests to the program.

    Raises ValueError for an unusable test, and Stopped.
    """
    imports, marked = ImportsOfProgram(parsed(case.text)), peer.raised_by_program
    tree, names = imports.tree, TestNames(imports, case.entry, peer.ask)
    peer.names = names
    called = {
        node.value.func.id
        for node in tree.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    }
    code = compile(ast.fix_missing_locations(Counted().visit(tree)), "test.py", "exec")
    sys.modules[MODULE] = ModuleType(MODULE)  # dataclasses look up their module
    unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # it would end this process
    try:
        with contextlib.suppress(SystemExit):
            exec(code, names)
        for call in collected(names, called):
            call()
    except AssertionError:
        return False
    except unittest.SkipTest as skipped:
        raise ValueError(f"a test is skipped: {skipped}") from None
    except (ImportError, SyntaxError) as error:
        if marked(error):
            return False
        raise ValueError(f"a test cannot run here: {error}") from None
    except (TypeError, AttributeError) as error:
        if names.foreign and not marked(error):
            raise ValueError(f"a value of the program cannot cross to the test: {error}") from None
        return False
    except Exception:
        return False
    finally:
        del sys.modules[MODULE]
    if not names.asserted:
        raise ValueError(f"a test that ran no assertion: {case.text.strip()[:80]!r}")
    return True


class TestNames(dict[str, Any]):
    """The names in a test: those that it defines, Python's, and those under test."""

    def __init__(self, imports: ImportsOfProgram, entry: str, ask: Callable[..., Any]) -> None:
        """Raises ValueError if the test trusts a name that only the program defines."""
        super().__init__()
        self.imports = imports
        self.ask, self.entry, self.asserted, self.foreign = ask, entry, 0, False
        self.subjects, values = named_under_test(imports.tree, entry, imports.names)
        self.pytest = Pytest()
        builtin = {"__import__": self.imported, "isinstance": self.is_instance, "issubclass": self.is_subclass}
        self.update(values, __name__=MODULE, __builtins__=vars(builtins) | builtin)
        self.update({COUNT: self.count, IS: self.same, TYPE: self.type_of})

    def __missing__(self, name: str) -> Any:
        if name == "candidate" and self.entry:
            name = self.entry
        if name in self.subjects:
            value = self.subject(name)
            if value is not None:
                return value
        if name in self["__builtins__"]:
            return self["__builtins__"][name]
        raise NameError(f"name {name!r} is not defined")

    def subject(self, name: str) -> Any:
        """Return a function or class of the program; None if the program lacks the name."""
        try:
            answer = self.ask("name", None, name)
        except KeyError:
            module = self.imports.names.get(name, "")
            if module.partition(".")[0] in ("", *PLACEHOLDERS):
                return None
            reason = f"a test cannot run here: no module {module!r}, and the program defines no {name}"
            raise TestStopped(ValueError(reason)) from None
        if not isinstance(answer, Foreign | type):
            raise TestStopped(ValueError(f"the test uses {name}, a value that only the program defines"))
        self.foreign = True
        return answer

    def count(self) -> None:
        self.asserted += 1

    def imported(self, name: str, *details: Any) -> Any:
        if name == "pytest":
            return self.pytest
        module = builtins.__import__(name, *details)
        if name == "asyncio":
            setattr(module, "run", run_awaitable)  # noqa: B010 (it is not this module's)
        return module

    def is_instance(self, value: Any, kind: Any) -> bool:
        return isinstance(value._plain() if isinstance(value, Foreign) and isinstance(kind, type) else value, kind)

    def is_subclass(self, kind: Any, base: Any) -> bool:
        if isinstance(kind, Foreign) and isinstance(base, Foreign | type):
            return bool(self.ask("subclass", None, "", kind, base) is True)
        return issubclass(kind, base)

    def type_of(self, value: Any) -> Any:
        return type(value._plain() if isinstance(value, Foreign) else value)

    def same(self, one: Any, other: Any) -> bool:
        """Return `one is other`, unless the program decides this."""
        if one is not other and isinstance(one, Foreign) and isinstance(other, Foreign):
            return bool(one == other)
        return one is other


class Counted(ast.NodeTransformer):
    """An AST transformer of a test.

    It inserts a count before each assertion, also in handlers of expected exceptions, and replaces `is` where values of
    the program may be compared.
    """

    def visit(self, node: ast.AST) -> Any:
        """Return the node, preceded by a count if it asserts."""
        asserts = isinstance(node, ast.stmt) and asserting(node)
        if isinstance(node, ast.Try) and any(asserting(part) for part in ast.walk(node) if isinstance(part, ast.stmt)):
            for handler in node.handlers:
                handler.body.insert(0, counting())
        visited = self.generic_visit(node)
        if (
            isinstance(visited, ast.Compare)
            and len(visited.ops) == 1
            and isinstance(visited.ops[0], ast.Is | ast.IsNot)
        ):
            visited = compared(visited)
        elif isinstance(visited, ast.Call) and len(visited.args) == 1 and ast.unparse(visited.func) == "type":
            visited.func = ast.Name(TYPE, ast.Load())
        return [counting(), visited] if asserts else visited


def counting() -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(COUNT, ast.Load()), [], []))


def compared(node: ast.Compare) -> ast.expr:
    """Return `a is b` as a call, unless one of them is a constant."""
    sides = [node.left, *node.comparators]
    if any(isinstance(side, ast.Constant) for side in sides):
        return node
    called = ast.Call(ast.Name(IS, ast.Load()), sides, [])
    return called if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), called)


def collected(names: TestNames, called: set[str]) -> Iterator[Callable[[], Any]]:
    """Yield the tests that a framework would call, except those that the test's module has called."""
    defined = {name: value for name, value in names.items() if getattr(value, "__module__", None) == MODULE}
    yield from (defined[name] for name in ("setup_module",) if inspect.isfunction(defined.get(name)))
    for name, value in defined.items():
        if inspect.isclass(value) and issubclass(value, unittest.TestCase):
            yield unittest.defaultTestLoader.loadTestsFromTestCase(value).debug
        elif inspect.isclass(value) and name.startswith("Test"):
            yield from calls_of(value, defined)
        elif not inspect.isfunction(value) or name in called:
            continue
        elif name.startswith("test"):
            yield from calls_of(value, defined)
        elif name == "check":
            candidates = len(inspect.signature(value).parameters)
            yield partial(lambda check, count: check(*[candidate(names)] * count), value, candidates)


def candidate(names: TestNames) -> Any:
    """Return the function for `check`. Raises ValueError if the data and the program do not determine it."""
    if not names.entry:
        functions = names.ask("functions")
        if not isinstance(functions, list) or not functions:
            raise TestStopped(None)
        if len(functions) > 1:
            raise TestStopped(
                ValueError("check(candidate) of a program of several functions: name it in `entry_point`")
            )
        names.entry = str(functions[0])
        names.subjects |= {names.entry}
    return names["candidate"] if "candidate" not in names else names[names.entry]


def run_awaitable(awaitable: Any, **_: Any) -> Any:
    """Run a coroutine as `asyncio.run` does, including one of the program."""
    import asyncio

    async def main() -> Any:
        return await awaitable

    with asyncio.Runner() as runner:
        return runner.run(main())

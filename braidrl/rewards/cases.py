"""The tests in a data set's answer, as the cases of the verifier `code`.

{"inputs", "outputs"}, or a list of {"input", "output"}        texts that the program reads and prints
the same with fn_name                                          arguments and results of a function
{"test" or "test_list", "test_setup_code", "entry_point"}      Python: asserts, functions, classes, `check(candidate)`
a text, or a list of texts                                     the same
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENTRY = ("fn_name", "entry_point", "func_name")
"""Keys, of the tests or of the example, that name the function under test."""
SETUP = ("test_imports", "test_setup_code")
TESTS = ("test_list", "test", "tests")
ASSERTING = ("raises", "fail", "warns")
"""Functions of pytest's and unittest's that assert, beside those whose names begin with `assert`."""


@dataclass(frozen=True)
class OutputCase:
    """The expected output of a program for an input."""

    given: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """The expected result of a function of the program, or of a method of its class `Solution`, for arguments."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class AssertCase:
    """A text of tests in Python; `entry` is the function under test, if the data names it."""

    text: str
    entry: str = ""


Case = OutputCase | CallCase | AssertCase


def cases_of(answer: Any, example: Mapping[str, Any] | None = None) -> list[Case]:
    """Return the tests in an answer; fields of the example may name the function under test, and prepare the tests.

    Raises ValueError if there are none, or for an unknown form.
    """
    example = example or {}
    answer = read(answer)
    fields = {**example, **answer} if isinstance(answer, dict) else example
    entry = next((str(fields[key]) for key in ENTRY if fields.get(key)), "")
    if isinstance(answer, dict):
        answer = listed(answer)
    if isinstance(answer, str):
        answer = [answer]
    if not isinstance(answer, list) or not answer:
        raise ValueError("the reference answer holds no tests")
    setup = "\n".join(map(joined, (fields[key] for key in SETUP if fields.get(key))))
    return [case_of(test, entry, setup) for test in answer]


def read(answer: Any) -> Any:
    """Parse an answer that is JSON, or a Python list or dict."""
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        pass
    if answer.lstrip()[:1] in ("{", "["):
        try:
            return ast.literal_eval(answer.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    return answer


def listed(answer: Mapping[str, Any]) -> Any:
    """Return the tests in an answer of several fields."""
    if "inputs" in answer or "outputs" in answer:
        inputs, outputs = answer.get("inputs") or [], answer.get("outputs") or []
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("the tests' `inputs` and `outputs` are no lists of one length")
        return [{"input": text, "output": out} for text, out in zip(inputs, outputs, strict=True)]
    if "input" in answer and "output" in answer:
        return [dict(answer)]
    for key in TESTS:
        if answer.get(key):
            return read(answer[key])
    raise ValueError(f"the reference answer has no tests: write `inputs` and `outputs`, or one of {', '.join(TESTS)}")


def case_of(test: Any, entry: str, setup: str) -> Case:
    """Return one test. Raises ValueError for an unknown form."""
    if isinstance(test, str):
        text = f"{setup}\n{test}" if setup else test
        if not any(asserting(node) for node in ast.walk(parsed(text)) if isinstance(node, ast.stmt)):
            raise ValueError(f"a test that asserts nothing: {test[:80]!r}")
        return AssertCase(text, entry)
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise ValueError(f"a test has `input` and `output`, or is a text of asserts, not {str(test)[:80]}")
    case_input, expected = test["input"], test["output"]
    function = next((str(test[key]) for key in ENTRY if test.get(key)), entry)
    if function and test.get("testtype", "functional") != "stdin":
        # `Solution().f` and `Solution.f` are the method `f` of the class.
        return CallCase(function.rpartition(".")[2], arguments_of(case_input), value_of(expected))
    if not isinstance(case_input := joined(case_input), str) or not isinstance(expected := joined(expected), str):
        raise ValueError(
            f"a test has texts as `input` and `output`, or names its function in fn_name: {str(test)[:80]}"
        )
    return OutputCase(case_input, expected)


def arguments_of(arguments: Any) -> list[Any]:
    """Return a call's arguments: a list of them, or a text with one of them in JSON on each line."""
    if isinstance(arguments, str):
        arguments = [value_of(line) for line in arguments.splitlines() if line.strip()]
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of a function are a list, not {str(arguments)[:80]}")
    return arguments


def value_of(text: Any) -> Any:
    """Return the value of a text that is JSON or a Python literal."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def joined(lines: Any) -> Any:
    """Return a list of lines as one text, other values unchanged."""
    return "\n".join(lines) if isinstance(lines, list) and all(isinstance(line, str) for line in lines) else lines


def parsed(text: str) -> ast.Module:
    """Parse a test. Raises ValueError if it is not Python."""
    try:
        return ast.parse(text, "test.py")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"a test is not Python: {error}: {text[:80]!r}") from None


def asserting(node: ast.stmt) -> bool:
    """Return True if a statement asserts: `assert`, a call of a function that asserts, or `if ...: raise`."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.If):
        return any(isinstance(part, ast.Raise) for part in node.body + node.orelse)
    if isinstance(node, ast.With | ast.AsyncWith):
        heads: list[ast.AST] = [item.context_expr for item in node.items]
    elif hasattr(node, "body"):
        return False
    else:
        heads = [node]
    calls = (part.func for head in heads for part in ast.walk(head) if isinstance(part, ast.Call))
    named = (getattr(function, "attr", getattr(function, "id", "")) for function in calls)
    return any(name.startswith("assert") or name in ASSERTING for name in named)

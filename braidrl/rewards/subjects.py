"""The names under test in a text of tests: names that are not defined, imported or built in.

A test is refused if one function of the program judges the result of another: the program could always agree.
"""

import ast
import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

STANDARD = (
    "math",
    "collections",
    "itertools",
    "functools",
    "fractions",
    "decimal",
    "datetime",
    "statistics",
    "operator",
    "string",
    "copy",
    "heapq",
    "bisect",
    "typing",
    "cmath",
    "unittest",
)
"""Modules whose names tests use without an import, since the solution of their data set has it."""
ALIASES = {"np": "numpy", "numpy": "numpy"}
PLACEHOLDERS = (
    "solution",
    "solutions",
    "my_solution",
    "your_solution",
    "your_module",
    "my_module",
    "program",
    "main",
    "module",
    "submission",
    "answer",
    "implementation",
    "candidate",
)
"""Names by which tests import what a response defines; a program without the imported name is wrong."""
ASSERTS = ("assertTrue", "assertFalse", "bool")


class ImportsOfProgram(ast.NodeTransformer):
    """Replaces imports from a missing module, as in `from solution import f`, by names of the program."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = dict[str, str]()
        """The module of each name."""
        plain = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
        self.modules = {
            alias.asname or alias.name: alias.name
            for node in plain
            for alias in node.names
            if is_missing_module(alias.name)
        }
        self.tree = ast.fix_missing_locations(self.visit(tree))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Return the assignments of names that are imported under another name."""
        module = node.module or ""
        if not node.level and not is_missing_module(module):
            return node
        named = [alias for alias in node.names if alias.name != "*"]
        self.names |= {alias.name: module for alias in named}
        renamed = [alias for alias in named if alias.asname]
        assignments: list[ast.stmt] = [
            ast.Assign([ast.Name(str(alias.asname), ast.Store())], ast.Name(alias.name, ast.Load()))
            for alias in renamed
        ]
        return assignments or ast.Pass()

    def visit_Import(self, node: ast.Import) -> Any:
        """Return the import without the missing modules."""
        node.names = [alias for alias in node.names if (alias.asname or alias.name) not in self.modules]
        return node if node.names else ast.Pass()

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Return an attribute of a missing module as a name."""
        self.generic_visit(node)
        if not isinstance(node.value, ast.Name) or node.value.id not in self.modules:
            return node
        self.names[node.attr] = self.modules[node.value.id]
        return ast.Name(node.attr, node.ctx)


def is_missing_module(module: str) -> bool:
    """Return True if no module of that name can be imported."""
    root = module.partition(".")[0]
    return root not in sys.modules and importlib.util.find_spec(root) is None


def named_under_test(tree: ast.Module, entry: str, imports: Iterable[str] = ()) -> tuple[set[str], dict[str, Any]]:
    """Return the names under test, and the modules and functions of the standard library by the names that the test
    uses without an import.

    `entry` is the function under test, if the data name it; `imports` are names that the test imports from the program.
    Raises ValueError if the program would judge itself.
    """
    unknown, called = free_names(tree), called_names(tree)
    attributes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    bases = {node.id for node in attributes if isinstance(node, ast.Name)}
    values = dict[str, Any]()
    for name in unknown & bases:
        if module := ALIASES.get(name, name if name in sys.stdlib_module_names else ""):
            values[name] = imported(module)
    standard = {name: value for name in unknown - values.keys() if (value := in_standard(name)) is not None}
    subjects = unknown - values.keys()
    if entry:
        subjects = {entry}
    elif subjects - standard.keys():
        subjects -= standard.keys()
    if not subjects and len(functions := {name for name in called if hasattr(builtins, name)}) == 1:
        subjects = functions  # a task may be to write a function that Python has under the same name
    subjects |= set(imports)
    values |= {name: value for name, value in standard.items() if name not in subjects}
    if judge := judging(tree, subjects):
        raise ValueError(
            f"the test uses the program's `{judge}` to judge what the program returns; define or import `{judge}` in "
            "the test"
        )
    return subjects, values


def free_names(tree: ast.AST) -> set[str]:
    """Return the names that are read, but not bound in the text or builtins of Python."""
    bound, read = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                bound |= set(dir(imported(str(node.module))))
    return {name for name in read - bound if not hasattr(builtins, name) and not name.startswith("__")}


def imported(module: str) -> Any:
    """Import what a test uses. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"a test cannot run here: {error}") from None


def in_standard(name: str) -> Any:
    """Return the standard library's object of a public name, or None."""
    modules = (importlib.import_module(module) for module in STANDARD)
    public = (m for m in modules if name in getattr(m, "__all__", dir(m)) and not name.startswith("_"))
    return next((getattr(module, name) for module in public), None)


def called_names(tree: ast.AST) -> set[str]:
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def judging(tree: ast.Module, subjects: set[str]) -> str:
    """Return a function under test that judges another one's result in the test; empty text if there is none."""
    if len(subjects) < 2:
        return ""
    sources = dict[str, set[str]]()
    for _ in range(2):  # a name's value may come from a name that is assigned later
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (part for whole_target in targets for part in ast.walk(whole_target)):
                    if isinstance(target, ast.Name):
                        sources.setdefault(target.id, set()).update(results_in(node.value, subjects, sources))
    for node in truths(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in subjects:
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            others = set[str]().union(*(results_in(argument, subjects, sources) for argument in arguments)) - {
                node.func.id
            }
            if any(
                not name[:1].isupper() for name in others
            ):  # an object of a class under test does not count as a result
                return node.func.id
    return ""


def results_in(node: ast.AST, subjects: set[str], sources: dict[str, set[str]]) -> set[str]:
    """Return the functions under test whose results occur in an expression."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return (called_names(node) & subjects).union(*(sources.get(name, set()) for name in names))


def truths(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions whose truth or order a test relies on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.If):
            yield from parts_of(node.test)
        elif isinstance(node, ast.Expr):
            yield from parts_of(node.value)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ASSERTS or name.startswith(("assertLess", "assertGreater")):
                for argument in node.args:
                    yield from parts_of(argument)


def parts_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression that a test relies on, and its parts."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from parts_of(value)
    elif isinstance(node, ast.UnaryOp):
        yield from parts_of(node.operand)
    elif isinstance(node, ast.BinOp):
        yield from (*parts_of(node.left), *parts_of(node.right))
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        if ordered or any(isinstance(side, ast.Constant) and isinstance(side.value, bool | None) for side in sides):
            for side in sides:
                yield from parts_of(side)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("abs", "bool", "all", "any"):
        for argument in node.args:
            yield from parts_of(argument)
    else:
        yield node

"""What a user calls, and what a plug-in implements or calls, says what its arguments are.

That is: whatever a page of the documentation or an example imports from the package, what its folders offer by `__all__`, the
protocols beside any of it, and the algorithms that a flow can name, whose columns `braidrl.algorithms` describes once for all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tiny import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for path in ROOT.glob("braidrl/**/*.py")
}
IMPORT = re.compile(r"^ *from (braidrl[\w.]*) import (\([^)]*\)|[^\n]*)", re.M)


def named() -> Iterator[tuple[str, str]]:
    """Module and name of everything that pages, examples and `__all__` name."""
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "examples/**/*.py"):
        for path in ROOT.glob(pattern):
            text = path.read_text()
            yield from ((module, name) for module, names in IMPORT.findall(text) for name in re.findall(r"\w+", names))
            for name in re.findall(r"braidrl(?:\.\w+)+", text):
                module, _, last = name.rpartition(".")
                yield module, last
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from ((module, str(name)) for name in ast.literal_eval(node.value))


def defined(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The module that defines a name, which another may only import, and its definition."""
    for node in MODULES[module].body if module in MODULES else ():
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return defined(node.module, name)
    return None


def surface() -> dict[str, tuple[Function, str]]:
    """By its name in the package, each public function that a user or a plug-in meets, and its class's docstring."""
    found = {definition for name in named() if (definition := defined(*name)) is not None}
    for module in {module for module, _ in found}:
        found |= {(module, node) for node in MODULES[module].body if is_protocol(node)}
    functions: dict[str, tuple[Function, str]] = {}
    for module, node in found:
        inside = isinstance(node, ast.ClassDef)
        place, about = (f"{module}.{node.name}", ast.get_docstring(node) or "") if inside else (module, "")
        for function in node.body if inside else [node]:
            if isinstance(function, Function) and (function.name == "__init__" or not function.name.startswith("_")):
                functions[f"{place}.{function.name}"] = function, about
    return functions


def is_protocol(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def is_registered(function: Function) -> bool:
    return any(".register(" in ast.unparse(decorator) for decorator in function.decorator_list)


def arguments(function: Function) -> set[str]:
    given = function.args
    found = {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return (found | {more.arg for more in (given.vararg, given.kwarg) if more is not None}) - {"self", "cls"}


def described(docstring: str) -> set[str]:
    """The names in a docstring's section Args, or in the columns of `braidrl.algorithms`."""
    section = re.search(r"^(?:Args|Columns):\n((?: +.*\n?)*)", docstring, re.M)
    return set(re.findall(r"^    (\w+): ", section[1], re.M)) if section else set()


def docstring(function: Function) -> str:
    return ast.get_docstring(function) or ""


SURFACE = {name: found for name, found in surface().items() if len(arguments(found[0])) > 1}
IN_PROTOCOLS = {
    (function.name, frozenset(arguments(function)))
    for tree in MODULES.values()
    for node in tree.body
    if isinstance(node, ast.ClassDef) and is_protocol(node)
    for function in node.body
    if isinstance(function, Function) and described(docstring(function))
}
ALGORITHMS = {
    f"{module.removeprefix('braidrl.algorithms.')}.{node.name}": node
    for module, tree in MODULES.items()
    for node in tree.body
    if module.startswith("braidrl.algorithms.") and isinstance(node, Function) and is_registered(node)
}
COLUMNS = described(ast.get_docstring(MODULES["braidrl.algorithms"]) or "")


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_what_users_and_plug_ins_meet_describes_its_arguments_and_what_it_returns(name: str) -> None:
    function, about = SURFACE[name]
    text, returned = docstring(function), ast.unparse(function.returns) if function.returns else "None"
    # What implements a protocol need not repeat it, nor a function that does as another.
    if text.startswith("Do as `") or (not text and (function.name, frozenset(arguments(function))) in IN_PROTOCOLS):
        return
    assert arguments(function) <= described(text) | set(re.findall(r"`(\w+)`", about))
    says = re.match(r"Return|Yield|Make|Draw", text) or re.search(r"^Returns:$", text, re.M)
    assert returned == "None" or says, f"it returns {returned}"


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_describes_its_settings_and_returns_and_reads_columns_that_are_described(name: str) -> None:
    function, text = ALGORITHMS[name], docstring(ALGORITHMS[name])
    assert re.match(r"Return|Drop|Join|Do as `", text)
    assert {column.arg for column in function.args.args} <= COLUMNS | described(text)
    assert {setting.arg for setting in function.args.kwonlyargs} <= described(text)


def test_every_family_of_algorithms_is_among_them() -> None:
    decorators = {ast.unparse(function.decorator_list[0]).split(".")[0] for function in ALGORITHMS.values()}
    assert decorators == {
        "advantages", "aggregations", "corrections", "divergences", "losses", "responses", "selections", "shapes",
    }  # fmt: skip


def test_the_plug_in_points_are_among_them() -> None:
    for name in (
        "flow.roles.Role.update", "rollout.engine.Engine.update_weights", "models.backend.TrainingBackend.forward_backward",
        "observe.trackers.Tracker.write", "transfer.protocols.register", "transfer.queue.transfer_queue.TransferQueue.put",
    ):  # fmt: skip
        assert f"braidrl.{name}" in SURFACE

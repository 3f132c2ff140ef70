"""Find every text that the program can end with or print, in its source: docs/messages.md is written from them.

braidrl/**/*.py ──ast──▶ calls that raise, print or warn ──what they are given──▶ words, with CAPITALS where a value is filled in

What a call is given is followed to its words: through local names, constants of a module, and what functions of the package return. Where a
message has a place for one of several texts, these are texts of their own.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRINTS = {"print", "echo", "warning", "tell", "say", "_say", "_say_once"}
"""Functions and methods whose first argument a user reads."""
FAMILIES = {"UserError", "WorkerError", "LostPeers", "EngineError", "StageFailure"}
"""Exceptions that end a run with their own words. Their subclasses do as well."""
RAISED_AGAIN = {"ValueError", "KeyError"}
"""Exceptions that become a user's mistake where they leave the files below."""
AGAIN = re.compile(r"braidrl/(algorithms/(?!ragged|random)|config/|flow/recipes/)")
TABLES = {"busy_lines"}
"""Functions that return a table."""
DEPTH = 8
"""How far a name is followed."""
SMALL = (ast.Name, ast.Constant, ast.Load, ast.Store, ast.alias, ast.arg, ast.operator)
"""Nodes without calls in them."""
LITERAL = re.compile(r"(?<![A-Za-z])[a-z][a-z'-]+")
PLAIN = {"int", "str", "sorted", "sum", "max", "min", "next", "iter", "tuple", "escape"}
"""Functions after whose argument a placeholder is named."""
EDGE = "\x00"
"""Around a placeholder, until the text is whole."""
SUGGESTION = "Did you mean NAME?"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    """A text that a user may read: the file that it is in, and whether it is an error, or goes into another text."""

    file: str
    text: str
    is_error: bool
    is_part: bool = False


@dataclass(frozen=True)
class Module:
    """A file of the package, and what its names stand for."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def nodes(self) -> list[tuple[Function | None, ast.AST]]:
        """Every call, statement and function, and the function that it is in."""
        found: list[tuple[Function | None, ast.AST]] = []
        left: list[tuple[Function | None, ast.AST]] = [(None, self.tree)]
        while left:
            inside, node = left.pop()
            if isinstance(node, ast.Call | ast.stmt):
                found.append((inside, node))
            inside = node if isinstance(node, Function) else inside
            left += [
                (inside, child) for child in reversed([*ast.iter_child_nodes(node)]) if not isinstance(child, SMALL)
            ]
        return found

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods by their names."""
        return {node.name: node for _, node in self.nodes if isinstance(node, Function)}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        return {name: value for node in self.tree.body for name, value in assigned(node)}

    @cached_property
    def attributes(self) -> list[tuple[str, ast.expr]]:
        """What methods assign to attributes, or append to them."""
        return [pair for _, node in self.nodes if isinstance(node, ast.stmt) for pair in assigned(node, "self")]

    @cached_property
    def imported(self) -> dict[str, str]:
        """The module of the package behind each name that this one imports from it."""
        froms = [node for _, node in self.nodes if isinstance(node, ast.ImportFrom)]
        inside = [node for node in froms if (node.module or "").startswith("braidrl")]
        return {alias.name: str(node.module) for node in inside for alias in node.names}

    def function(self, name: str) -> tuple[Module, Function] | None:
        """Return the function that a name stands for, and the module that it is in."""
        if name in self.functions:
            return self, self.functions[name]
        found = module(self.imported[name]) if name in self.imported else None
        return found.function(name) if found else None

    def constant(self, name: str) -> tuple[Module, ast.expr] | None:
        """Return what a constant of this module, or one that it imports, is given, and the module that it is in."""
        if name in self.constants:
            return self, self.constants[name]
        found = module(self.imported[name]) if name in self.imported else None
        return found.constant(name) if found else None


@cache
def module(name: str) -> Module | None:
    """Return a module of the package."""
    place = ROOT / name.replace(".", "/")
    return next((Module(path) for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


@cache
def sources() -> tuple[Module, ...]:
    """Return every module of the package."""
    paths = (ROOT / "braidrl").rglob("*.py")
    return tuple(found for path in sorted(paths) if (found := module(dotted(path))) is not None)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def assigned(node: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Yield the names, or attributes of `owner`, that a statement or := gives a value or adds one to; of a loop, what it goes through."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = list(zip(targets, values, strict=False))
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            pairs = [(target, value)]
        case ast.NamedExpr(target=target, value=value):
            pairs = [(target, value)]
        case ast.For(target=target, iter=value) | ast.AugAssign(target=target, value=value):
            pairs = [(target, value)]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value])):
            pairs = [(target, value)]
        case _:
            pairs = []
    for target, value in pairs:
        if isinstance(target, ast.Name) and not owner:
            yield target.id, value
        elif isinstance(target, ast.Attribute) and owner and ast.unparse(target.value) == owner:
            yield target.attr, value


@cache
def values_of(function: Function) -> dict[str, list[ast.expr]]:
    """Return what each name of a function is given."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        for name, value in assigned(node):
            values.setdefault(name, []).append(value)
    return values


@cache
def ending() -> frozenset[str]:
    """Return the names of the exceptions that end a run with their own words."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    names = set(FAMILIES)
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return frozenset(names)


@cache
def messages() -> tuple[Message, ...]:
    """Return all texts that have words of their own, in the order of the files."""
    gc.disable()  # trees are large, live to the end, and would be looked through again and again
    found = [message for source in sources() for message in of_module(source)]
    gc.enable()
    kept = {message.text: message for message in reversed(found) if says_something(message)}
    return tuple(reversed(kept.values()))


def says_something(message: Message) -> bool:
    """Return whether a text has words by which one could search for it."""
    return len(LITERAL.findall(message.text)) > (2 if message.is_part else not message.is_error) and " " in message.text


def of_module(source: Module) -> Iterator[Message]:
    """Yield the texts of a file, and those that go into them."""
    file = str(source.path.relative_to(ROOT))
    for inside, call in source.nodes:
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).split(".")[-1]
        is_error = ends_a_run(call.func, inside) or (name in RAISED_AGAIN and bool(AGAIN.match(file)))
        if call.args and (is_error or name in PRINTS):
            scope = Scope(source, inside)
            texts = scope.texts(call.args[0])
            yield from (Message(file, plain(text), is_error) for text in texts)
            yield from (Message(at, plain(text), is_error, is_part=True) for at, text in scope.parts)


def ends_a_run(called: ast.expr, inside: Function | None) -> bool:
    """Return whether what is called is an exception that ends a run with its own words, or one of several."""
    match called:
        case ast.Name(id=name) if inside is not None and name in values_of(inside):
            return any(ends_a_run(value, inside) for value in values_of(inside)[name])
        case ast.Name(id=name):
            return name in ending()
        case ast.IfExp(body=body, orelse=orelse):
            return ends_a_run(body, inside) or ends_a_run(orelse, inside)
    return ast.unparse(called) == "place.error"


def plain(text: str) -> str:
    """Return a text in one line, without rich's markup, and with spaces around parts that may begin or end with one."""
    text = re.sub(rf"(?<=[a-z]{{2}}){EDGE}(?=[A-Z])|{EDGE}(?=[A-Z][a-z])|{EDGE * 2}", " ", text).replace(EDGE, "")
    return re.sub(r"^[;:,.] ", "", " ".join(re.sub(r"\[/?bold\]", "", text).split()))


@dataclass
class Scope:
    """Where an expression stands, to know what its names stand for; `parts` collects texts that go into others."""

    source: Module
    inside: Function | None
    depth: int = 0
    parts: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, node: ast.expr) -> list[str]:
        """Return the texts that an expression may have; none where it has no words of its own."""
        if self.depth > DEPTH:
            return []
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return ["".join(chosen) for chosen in product(*(self.part(value) for value in values))]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self.sum(left, right)
            case ast.IfExp(body=body, orelse=orelse):
                return self.all_of([body, orelse])
            case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values) | ast.Dict(values=values):
                return self.all_of(values)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.texts(value)
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                return self.texts(element)
            case ast.Name(id=name):
                return self.named(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                values = [value for known, value in self.source.attributes if known == name]
                return self.deeper().all_of(values)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return [SUGGESTION] if name == "suggest" else self.returned(name)
        return []

    def part(self, part: ast.expr) -> list[str]:
        """Return what a part of an f-string says: its words, or a placeholder where these are several."""
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part)
        quoted = part.conversion == ord("r")
        texts = [] if quoted else list(dict.fromkeys(self.texts(part.value)))
        if len(texts) == 1 and LITERAL.search(texts[0]):
            return texts
        at = str(self.source.path.relative_to(ROOT))
        self.parts += [(at, text) for text in texts]
        return [placeholder(part.value, quoted)]

    def sum(self, left: ast.expr, right: ast.expr) -> list[str]:
        """Return the texts of two parts, if any has words."""
        sides = [self.texts(side) for side in (left, right)]
        if not any(sides):
            return []
        filled = [texts or [placeholder(side)] for texts, side in zip(sides, (left, right), strict=True)]
        return ["".join(chosen) for chosen in product(*filled)]

    def all_of(self, nodes: list[ast.expr]) -> list[str]:
        return list(dict.fromkeys(text for node in nodes for text in self.texts(node)))

    def named(self, name: str) -> list[str]:
        """Return the texts of what a name of the function, else of a module, is given."""
        values = values_of(self.inside).get(name) if self.inside else None
        if values:
            return self.deeper().all_of(values)
        found = self.source.constant(name)
        return self.deeper(found[0], None).texts(found[1]) if found else []

    def returned(self, name: str) -> list[str]:
        """Return the texts that a function of the package may return or yield."""
        found = self.source.function(name)
        if found is None or name in TABLES:
            return []
        nodes = [node for node in ast.walk(found[1]) if isinstance(node, ast.Return | ast.Yield)]
        return self.deeper(*found).all_of([node.value for node in nodes if node.value])

    def deeper(self, source: Module | None = None, inside: Function | None = None) -> Scope:
        """Return the scope of what a name stands for."""
        scope = (source, inside) if source else (self.source, self.inside)
        return Scope(*scope, self.depth + 1, self.parts)


def placeholder(node: ast.expr, quoted: bool = False) -> str:
    """Return what is filled in by an expression, as a word in capitals."""
    text = value_name(node).strip("_").upper() or "VALUE"
    return f"'{text}'" if quoted else f"{EDGE}{text}{EDGE}"


def value_name(node: ast.expr) -> str:
    """Return the word that says most of what an expression is."""
    match node:
        case ast.Name(id=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr="name" | "label") if owner != "self":
            return owner
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type")), attr="__name__"):
            return "type"
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id="len")):
            return "count"
        case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in PLAIN:
            return value_name(value)
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return value_name(value)
        case ast.Call(func=ast.Name(id=name), args=args):
            return "error" if any(ast.unparse(value) == "error" for value in args) else name
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            return name if ast.unparse(value) == "self" else value_name(value)
        case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value) | ast.Subscript(value=value) | ast.BinOp(left=value):
            return value_name(value)
        case ast.IfExp(body=body, orelse=orelse):
            return value_name(body) or value_name(orelse)
        case ast.BoolOp(values=[value, *_]):
            return value_name(value)
    return ""

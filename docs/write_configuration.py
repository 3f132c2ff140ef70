"""Write configuration.md from the docstrings of braidrl/config and of the recipes: python
docs/write_configuration.py
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from braidrl.config import Config
from braidrl.flow.recipes import RECIPES
from braidrl.flow.recipes.load import parameter_model
from braidrl.flow.recipes.parts import PolicyParameters

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration

A configuration is a YAML file, `key=value` arguments with dots, or both, of which the arguments win:

    braid train config.yaml trainer.steps=10 data.eval.test=test.jsonl

Every key but `flow` and `model` has a default. An unknown key is an error that names the nearest known one. What a run
used, defaults included, is in its folder as `config.yaml`. `NAME` below is a name of your own, `N` a position in a
list, from 0. Short forms: a path for a source, a name for a verifier, one of either in place of a list. A relative path
in a file (a model, data, a flow, or a function, `file.py:name`) is looked for beside that file first, and then in the
folder that the command runs in; one in an argument, and `output`, are of the latter. This page is written by
`docs/write_configuration.py`.
"""
ALGORITHM = """
## algorithm

Parameters of the recipe that `flow` names. `max_response_tokens` and `samples_per_prompt` are taken from `rollout`.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, "\n## At the top\n\n", table(Config)]
    places: dict[type[BaseModel], list[str]] = {}
    for path, section in sections(Config):
        places.setdefault(section, []).append(path)
    for section, paths in places.items():
        parts += [f"\n## {', '.join(paths)}\n\n{section.__doc__}\n\n", table(section)]
    parts.append(ALGORITHM)
    parts += ["\n### Of every recipe that improves a policy by a clipped ratio\n\n", table(PolicyParameters)]
    for name in sorted(RECIPES):
        model = parameter_model(name, RECIPES.find(name))
        shared = PolicyParameters.model_fields if model and issubclass(model, PolicyParameters) else {}
        own = {n: f for n, f in (model.model_fields if model else {}).items() if differs(shared, n, f)}
        about = " ".join((RECIPES.find(name).__doc__ or "").split())
        parts.append(f"\n### {name}\n\n{about}\n")
        if own:
            assert model is not None
            parts.append("\n" + rows(own, meanings(model)))
    return "".join(parts)


def differs(shared: dict[str, FieldInfo], name: str, field: FieldInfo) -> bool:
    """Return True for a parameter that is not shared by all recipes, or has another default."""
    return name not in shared or shared[name].default != field.default


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section below a model with its dotted name; `NAME` stands for a name of the user's, `N` for an index
    in a list.
    """
    for name, field in model.model_fields.items():
        for section, path in found_sections(field.annotation, prefix + name):
            yield path, section
            yield from sections(section, f"{path}.")


def found_sections(annotation: Any, path: str) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, path
        return
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    step = {dict: ".NAME", list: ".N"}.get(origin, "")
    for argument in arguments:
        yield from found_sections(argument, path + step)


def table(model: type[BaseModel]) -> str:
    return rows(model.model_fields, meanings(model))


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring under each field.

    If pydantic collected them, every process of a run would start 0.1 s later.
    """
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found


def rows(fields: dict[str, FieldInfo], meanings: dict[str, str]) -> str:
    """Return one line per key. Raises ValueError for a key without a docstring."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        if name not in meanings:
            raise ValueError(f"{name} has no docstring; say what it means under the field")
        meaning = meanings[name].replace("|", "\\|")
        lines.append(f"| `{name}` | {default(field)} | {choices(field)}{meaning} |")
    return "\n".join(lines) + "\n"


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be set"
    if isinstance(value, BaseModel) or value in ({}, []):
        return ""
    return f"`{plain(value)}`"


def plain(value: Any) -> str:
    """Return a value in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, BaseModel):
        return plain(getattr(value, "name", value))
    return str(value)


def choices(field: FieldInfo) -> str:
    """Return the values of a choice, for the text in front of its meaning."""
    for part in (field.annotation, *typing.get_args(field.annotation)):
        if typing.get_origin(part) is typing.Literal:
            optional = isinstance(field.annotation, types.UnionType)
            names = [f"`{name}`" for name in typing.get_args(part)]
            return f"{', '.join(names)}{' or null' if optional else ''}. "
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

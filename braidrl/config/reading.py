"""Reads a configuration: YAML, then overrides of single keys, then every key checked; a mistake is one line.

file ──YAML──▶ tree ◀── key=value        tree ──checked──▶ Config
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from braidrl.config.config import Config
from braidrl.errors import UserError, suggest
from braidrl.importing import relative_to

READ_FROM = re.compile(r"model|roles\.[^.]+\.model|data\.(train|ptx|eval\.[^.]+)(\.path)?|rollout\.servers\.folder")
"""Keys of what a run reads, which is looked for beside the file that names it."""


def load_config(path: Path | str | None, overrides: Sequence[str] = (), **defaults: Any) -> Config:
    """Read a configuration and check every key.

    Args:
        path: A YAML file; None is an empty one.
        overrides: Dotted `key=value` each, or a YAML file that lies over the first.
        defaults: Keys, with values for where nobody set them.

    Returns:
        The configuration, every value checked.

    Raises:
        UserError: One line about a key or a value that does not exist or is out of its range.
    """
    tree: Any = {}
    if path is not None:
        tree = read_tree(Path(path))
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            lay_over(tree, read_tree(Path(override)))
        else:
            apply_override(tree, override)
    return parse_config({**defaults, **tree})


def read_tree(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises UserError where it has none.

    A model, data, a flow, and a function in a file, `file.py:name`, are looked for beside the YAML file first, and in the current
    folder then.
    """
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, as in `flow: dapo`")
    return dict(found_beside(path.parent, tree))


def found_beside(folder: Path, value: Any, place: str = "") -> Any:
    """Return a part of a tree, in which what lies in a folder has an absolute path; `place` is the part's dotted key."""
    if isinstance(value, dict):
        return {
            name: found_beside(folder, part, f"{place}.{name}" if place else str(name)) for name, part in value.items()
        }
    if isinstance(value, list):
        return [found_beside(folder, part, place) for part in value]
    if not isinstance(value, str):
        return value
    is_path = READ_FROM.fullmatch(place) or (place == "flow" and value.endswith((".yaml", ".yml")))
    if is_path and (folder / value).exists():
        return os.path.abspath(folder / value)
    return relative_to(folder, value)


def lay_over(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Set the keys of one nested dict in another, section by section; a layout is replaced whole."""
    for key, value in over.items():
        old = tree.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not key.endswith("layout"):
            lay_over(old, value)
        else:
            tree[key] = value


def parse_config(tree: dict[str, Any]) -> Config:
    """Check a nested dict. Raises UserError naming the first key at fault."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in a nested dict.

    Args:
        tree: The dict that is changed.
        override: `key=value`, with dots in the key; the value is read as YAML.

    Raises:
        UserError: It is not key=value, or the key leads through a value.
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not key=value, as in trainer.steps=10")
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"{override!r}: {parent!r} holds a value, not a section")
    try:
        tree[last] = as_number(yaml.safe_load(value))
    except yaml.YAMLError:
        raise UserError(f"{override!r}: the value is not YAML") from None


def as_number(value: Any) -> Any:
    """Return the number that a text such as `1e-6`, which YAML reads as text, stands for; anything else as it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def explain(error: ValidationError) -> str:
    """Return one line for the first thing that is wrong."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}. {suggest(str(first['loc'][-1]), section_keys(first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{place!r} is not set; give it in the file or as {place}=..."
    return f"{place}: {first['msg']}, got {first['input']!r}"


def section_keys(place: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section at `place`."""
    section: type[BaseModel] = Config
    for part in place:
        if isinstance(part, int) or part not in section.model_fields:
            continue
        found = section_type(section.model_fields[part].annotation)
        section = found or section
    return list(section.model_fields)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the section inside an annotation such as `dict[str, RoleConfig]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = section_type(part)
        if found:
            return found
    return None

"""Reads a configuration: YAML, then overrides of single keys, then every key checked; a mistake is one line.

file ──YAML──▶ tree ◀── key=value        tree ──checked──▶ Config
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from braidrl.config.config import Config
from braidrl.errors import Problems, UserError, shown, suggest
from braidrl.importing import relative_to
from braidrl.parsing import MOST_LEVELS, check_levels, texts_and_numbers
from braidrl.yaml_text import parse_yaml, read_yaml

CODE = re.compile(r"(?:agent:|verifiers:)?([^\s:]+\.py)(?::[A-Za-z_]\w*)?")
"""A value that names code in a file."""
OTHERS_SETTINGS = re.compile(r".*\.(params|vllm|engine_settings|optimizer_settings)(\..*)?|data\.system_prompt")
"""Keys whose texts may mean anything."""
READ_FROM = re.compile(r"model|roles\.[^.]+\.model|data\.(train|ptx|eval\.[^.]+)(\.path)?|rollout\.servers\.folder")
"""Keys of what a run reads, which is looked for beside the file that names it."""


def load_config(path: Path | str | None, overrides: Sequence[str] = (), every: bool = False, **defaults: Any) -> Config:
    """Read a configuration and check every key.

    Args:
        path: A YAML file; None is an empty one.
        overrides: Dotted `key=value` each, or a YAML file that lies over the first.
        every: Name every key at fault, one a line, and not the first alone.
        defaults: Keys, with values for where nobody set them.

    Returns:
        The configuration, every value checked.

    Raises:
        UserError: One line about a key or a value that does not exist or is out of its range.
    """
    tree = given_keys(path, overrides)
    if path is not None:
        # What an override names is looked for in the current folder first.
        tree = found_beside(Path(path).parent, tree, unless_here=True)
        check_code(Path(path).parent, tree)
    return parse_config({**defaults, **tree}, every)


def given_keys(path: Path | str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of a file, or of none, with overrides laid over them. Raises UserError as `load_config`."""
    tree: dict[str, Any] = {} if path is None else read_tree(Path(path))
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            lay_over(tree, read_tree(Path(override)))
        else:
            apply_override(tree, override)
    return tree


def read_tree(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises UserError where it has none.

    A model, data, a flow, and a function in a file, `file.py:name`, are looked for beside the YAML file first, and in the current
    folder then.
    """
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    tree = read_yaml(path) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, as in `flow: dapo`")
    return dict(found_beside(path.parent, tree))


def found_beside(folder: Path, value: Any, place: str = "", unless_here: bool = False) -> Any:
    """Return a part of a tree, in which what lies in a folder has an absolute path.

    Args:
        folder: The configuration's.
        value: The part.
        place: The part's dotted key.
        unless_here: Leave what lies in the current folder.
    """
    if isinstance(value, dict):
        parts = {name: f"{place}.{name}" if place else str(name) for name in value}
        return {name: found_beside(folder, part, parts[name], unless_here) for name, part in value.items()}
    if isinstance(value, list):
        return [found_beside(folder, part, place, unless_here) for part in value]
    if not isinstance(value, str):
        return value
    is_path = READ_FROM.fullmatch(place) or (place == "flow" and value.endswith((".yaml", ".yml")))
    if is_path:
        here = unless_here and Path(value).exists()
        return os.path.abspath(folder / value) if (folder / value).exists() and not here else value
    return relative_to(folder, relative_to(Path.cwd(), value) if unless_here else value)


def check_code(folder: Path, value: Any, place: str = "") -> None:
    """Raise UserError, naming the key and both places, for code in a file that is neither beside the configuration nor here."""
    if isinstance(value, dict):
        for name, part in value.items():
            check_code(folder, part, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for part in value:
            check_code(folder, part, place)
    elif isinstance(value, str) and not OTHERS_SETTINGS.fullmatch(place):
        code = CODE.fullmatch(value)
        if code is not None and not Path(code[1]).is_file():
            raise UserError(
                f"{place}: there is no file {code[1]}, neither beside the configuration in {folder.absolute()} nor in {Path.cwd()}; "
                "give its path"
            )


def lay_over(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Set the keys of one nested dict in another, section by section; a layout is replaced whole."""
    for key, value in over.items():
        old = tree.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not key.endswith("layout"):
            lay_over(old, value)
        else:
            tree[key] = value


def parse_config(tree: dict[str, Any], every: bool = False) -> Config:
    """Check a nested dict. Raises UserError naming the first key at fault, or with `every` each of them in a line."""
    check_plain(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise Problems(explanations(error)) if every else UserError(explain(error)) from None


def check_plain(tree: dict[str, Any]) -> None:
    """Raise UserError, naming the key, for a number or a text that no key may have: infinity, half of a character, or a NUL."""
    try:
        check_levels(tree)
    except ValueError as error:
        raise UserError(f"the configuration cannot be used: {error}") from None
    for place, value in texts_and_numbers(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{place}: Input should be a finite number, got {value}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{place}: Input should be a whole number of 64 bits, got {shown(value)}")
        if isinstance(value, str) and (
            "\0" in value or (not value.isascii() and value != value.encode(errors="replace").decode())
        ):
            raise UserError(f"{place}: Input should be text without NUL and half characters, got {shown(value)}")


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
        raise UserError(f"{shown(override)} is not key=value, as in trainer.steps=10")
    *parents, last = key.split(".")
    if len(parents) > MOST_LEVELS:
        raise UserError(f"{shown(override)}: the key is nested more than {MOST_LEVELS} levels deep")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"{shown(override)}: {parent!r} holds a value, not a section")
    tree[last] = as_number(parse_yaml(value, shown(override)))


def as_number(value: Any) -> Any:
    """Return the number that a text such as `1e-6`, which YAML reads as text, stands for; anything else as it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def explanations(error: ValidationError) -> list[str]:
    """Return a line for each key that is wrong."""
    lines = dict[str, str]()
    for found in error.errors():
        lines.setdefault(".".join(map(str, keys_of(found))), explained(found, error))
    return list(lines.values())


def explain(error: ValidationError) -> str:
    """Return one line for the first thing that is wrong."""
    return explained(error.errors()[0], error)


def keys_of(found: Any) -> tuple[int | str, ...]:
    """Return the keys that lead to a mistake, without the names of a union's members that pydantic adds."""
    return tuple(part for part in found["loc"] if not re.search(r"[\[(<]|^(str|int|float|bool)$", str(part)))


def explained(first: Any, error: ValidationError) -> str:
    """Return one line for one of the mistakes of an error."""
    keys = keys_of(first)
    place = shown(".".join(map(str, keys))).strip("'")
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}. {suggest(str(first['loc'][-1]), section_keys(first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{place!r} is not set; give it in the file or as {place}=..."
    if first["type"] == "int_parsing_size":
        return f"{place}: Input should be an integer between -2^63 and 2^63 - 1, got {shown(first['input'])}"
    others = error.errors() if keys != first["loc"] else []
    also = [other["msg"] for other in others if other["loc"][: len(keys)] == keys]
    return f"{place}: {' or '.join(dict.fromkeys([first['msg'], *also]))}, got {shown(first['input'])}"


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

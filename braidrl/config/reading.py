"""Loading of a configuration: YAML, overrides of single keys, validation. Each mistake is a message of one line.

file ──YAML──▶ tree ◀── key=value        tree ──checked──▶ Config
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from braidrl.config.config import Config
from braidrl.config.environment import LIBRARIES
from braidrl.errors import Problems, UserError, shown, suggest
from braidrl.importing import relative_to
from braidrl.parsing import MOST_LEVELS, check_levels, parse_yaml, read_yaml, texts_and_numbers

CODE = re.compile(r"(?:agent:|verifiers:)?([^\s:]+\.py)(?::[A-Za-z_]\w*)?")
"""A value that names code in a file."""
OTHERS_SETTINGS = re.compile(r".*\.(params|vllm|engine_settings|optimizer_settings)(\..*)?|data\.system_prompt")
"""Keys with free text, which is not checked for code."""
UNION_MEMBER = re.compile(r"[\[(<]|^(str|int|float|bool)$")
"""A part of an error's location that pydantic adds to the keys."""
READ_FROM = re.compile(r"model|roles\.[^.]+\.model|data\.(train|ptx|eval\.[^.]+)(\.path)?|rollout\.servers\.folder")
"""Keys with input paths, which are searched in the folder of the configuration file."""

LIBRARY = re.compile(rf"rollout\.environment\.({'|'.join(LIBRARIES)})")
"""Keys with the name of a library's environment, which may be a file of the user."""

GONE: dict[str, tuple[object, str]] = {
    "rollout.check_weights": (False, "rollout.max_log_prob_gap ends a run whose engine has other weights; remove it"),
    "roles.*.generate_workers": (None, "every rank generates, as it trains; remove it"),
}
"""Keys of earlier versions: their default, which a recorded configuration has, and what there is instead."""


def load_config(path: Path | str | None, overrides: Sequence[str] = (), every: bool = False, **defaults: Any) -> Config:
    """Load and validate a YAML file, if any, and overrides: dotted `key=value`, or YAML files whose keys win.

    `defaults` are for unset keys. Raises UserError for an invalid key or value; with `every` for all of them, one per
    line.
    """
    tree = given_keys(path, overrides)
    if path is not None:
        # Paths in overrides are searched in the current folder first.
        folder = Path(path).parent
        tree = found_beside(folder, tree, unless_here=True)
        for key, value in texts_and_numbers(tree):
            code = CODE.fullmatch(value) if isinstance(value, str) and not OTHERS_SETTINGS.fullmatch(key) else None
            if code is not None and not Path(code[1]).is_file():
                raise UserError(
                    f"{key}: there is no file {code[1]}, neither beside the configuration in {folder.absolute()} nor "
                    f"in {Path.cwd()}; give its path"
                )
    return parse_config({**defaults, **tree}, every)


def given_keys(path: Path | str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of a file with overrides applied. Raises UserError as `load_config`."""
    tree: dict[str, Any] = {} if path is None else read_tree(Path(path))
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            lay_over(tree, read_tree(Path(override)))
        else:
            apply_override(tree, override)
    return tree


def read_tree(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, with files beside it found (`found_beside`).

    Raises UserError if it has none.
    """
    if not path.is_file():
        raise UserError(f"no configuration file {path}")
    tree = read_yaml(path) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, as in `flow: dapo`")
    return dict(found_beside(path.parent, tree))


def found_beside(folder: Path, value: Any, key: str = "", unless_here: bool = False) -> Any:
    """Return a tree with absolute paths for files in the configuration's folder; `unless_here` keeps paths of the
    current folder.
    """
    if isinstance(value, dict):
        parts = {name: f"{key}.{name}" if key else str(name) for name in value}
        return {name: found_beside(folder, part, parts[name], unless_here) for name, part in value.items()}
    if isinstance(value, list):
        return [found_beside(folder, part, key, unless_here) for part in value]
    if not isinstance(value, str):
        return value
    library = LIBRARY.fullmatch(key)
    if library is not None:
        reference = f"{library[1]}:{value}"
        path = relative_to(folder, relative_to(Path.cwd(), reference) if unless_here else reference)
        return path.removeprefix(f"{library[1]}:")
    is_path = READ_FROM.fullmatch(key) or (key == "flow" and value.endswith((".yaml", ".yml")))
    if is_path:
        here = unless_here and Path(value).exists()
        return os.path.abspath(folder / value) if (folder / value).exists() and not here else value
    return relative_to(folder, relative_to(Path.cwd(), value) if unless_here else value)


def lay_over(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Merge a nested dict into another one, section by section; a layout is replaced as a unit."""
    for key, value in over.items():
        old = tree.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not key.endswith("layout"):
            lay_over(old, value)
        else:
            tree[key] = value


def parse_config(tree: dict[str, Any], every: bool = False) -> Config:
    """Validate a nested dict.

    Raises UserError for the first invalid key, or with `every` for all of them, one per line.
    """
    try:
        check_levels(tree)
    except ValueError as error:
        raise UserError(f"the configuration cannot be used: {error}") from None
    for key, value in texts_and_numbers(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}: Input should be a finite number, got {value}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{key}: Input should be a whole number of 64 bits, got {shown(value)}")
        if isinstance(value, str) and (
            "\0" in value or (not value.isascii() and value != value.encode(errors="replace").decode())
        ):
            raise UserError(f"{key}: Input should be text without NUL and half characters, got {shown(value)}")
    tree = without_removed_keys(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = explain(error)
        more = f" ({len(lines) - 1} more; --dry-run lists them all)" if len(lines) > 1 else ""
        raise (Problems("\n".join(lines)) if every else UserError(lines[0] + more)) from None


def without_removed_keys(tree: Mapping[Any, Any], section: str = "") -> dict[Any, Any]:
    """Return a tree without keys of earlier versions that have their default. Raises UserError for another value."""
    remaining: dict[Any, Any] = {}
    for key, value in tree.items():
        path = f"{section}{key}"
        gone = next((reason for pattern, reason in GONE.items() if fnmatchcase(path, pattern)), None)
        if gone is None:
            remaining[key] = without_removed_keys(value, f"{path}.") if isinstance(value, dict) else value
        elif value != gone[0]:
            raise UserError(f"{path} is gone: {gone[1]}")
    return remaining


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value`, where the value is YAML, in a nested dict, in place. Raises UserError if it is not key=value."""
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
    tree[last] = parsed = parse_yaml(value, shown(override))
    if isinstance(parsed, str):
        # YAML reads a number such as 1e-6 as text.
        with suppress(ValueError):
            tree[last] = float(parsed)


def explain(error: ValidationError, root: type[BaseModel] = Config) -> list[str]:
    """Build a message of one line for each invalid key of a `root`."""
    lines, faults = dict[tuple[int | str, ...], str](), error.errors()
    for first in faults:
        keys = tuple(part for part in first["loc"] if not UNION_MEMBER.search(str(part)))
        if keys in lines:
            continue
        key = shown(".".join(map(str, keys))).strip("'")
        if first["type"] == "extra_forbidden":
            *section, name = map(str, first["loc"])
            here = section_keys(section, root)
            is_begun = any(known.startswith(name) for known in here)
            elsewhere = None if is_begun else next(keys_named(name, root), None)
            keys_hint = f"Did you mean {elsewhere!r}?" if elsewhere else suggest(name, here)
            lines[keys] = f"unknown key {key!r}. {keys_hint}"
        elif first["type"] == "missing":
            lines[keys] = f"{key!r} is not set; give it in the file or as {key}=..."
        elif first["type"] == "model_type" and first["input"] is None:
            lines[keys] = f"{key} is empty; write its keys below it, or remove it"
        elif first["type"] == "model_type" and keys == first["loc"]:
            keys_hint = ", ".join(section_keys(keys, root)[:3])
            lines[keys] = f"{key} is a section with keys such as {keys_hint}, got {shown(first['input'])}"
        elif first["type"] == "dict_type" and keys and keys == first["loc"]:
            lines[keys] = f"{key} has values by name; write {key}.NAME=..., got {shown(first['input'])}"
        else:
            # One fault for each member of a union.
            same = [fault["msg"] for fault in faults if keys != first["loc"] and fault["loc"][: len(keys)] == keys]
            if first["type"] == "int_parsing_size":
                same = ["Input should be an integer between -2^63 and 2^63 - 1"]
            reason = " or ".join(dict.fromkeys(same or [first["msg"]])).removeprefix("Value error, ")
            lines[keys] = f"{key}: {reason}, got {shown(first['input'])}".removeprefix(": ")
    return list(lines.values())


def section_keys(location: Sequence[int | str], root: type[BaseModel] = Config) -> list[str]:
    """Return the keys of the section at `location`."""
    section = root
    for part in location:
        if isinstance(part, str) and part in section.model_fields:
            section = section_in(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def keys_named(name: str, section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the paths of the keys of this name in a section, then in those below it."""
    if name in section.model_fields:
        yield f"{path}{name}"
    for key, field in section.model_fields.items():
        if (below := section_in(field.annotation, of_dict=False)) is not None:
            yield from keys_named(name, below, f"{path}{key}.")


def section_in(annotation: Any, of_dict: bool = True) -> type[BaseModel] | None:
    """Return the section in an annotation such as `RoleConfig | None`, or `dict[str, RoleConfig]` where `of_dict`."""
    annotations: list[Any] = [annotation]
    while annotations:
        first = annotations.pop(0)
        if isinstance(first, type) and issubclass(first, BaseModel):
            return first
        if of_dict or get_origin(first) is not dict:
            annotations = [*getattr(first, "__args__", ()), *annotations]
    return None

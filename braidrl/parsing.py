"""Parsing of untrusted JSON and YAML with limits of size and depth. Exceeding a limit is an error of one line, like bad
syntax.

bytes ──at most so many──▶ text ──at most MOST_LEVELS deep, finite numbers, whole characters──▶ plain values

YAML and text files are always UTF-8, and a key may occur only once.
"""

import codecs
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from braidrl.errors import UserError

MOST_LEVELS = 64
"""Maximum nesting depth: few readers and writers of nested values accept a thousand levels."""
TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"
JSON_BYTES = 64 << 20
YAML_BYTES = 1 << 20
YAML_VALUES = 100_000
"""Maximum number of keys and values of a YAML text with expanded aliases."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""PyYAML's loader and dumper in C where it has them, which take a tenth of the time."""


def parse_json(
    text: bytes | str, most_bytes: int = JSON_BYTES, finite: bool = True, refuse_surrogates: bool = True
) -> Any:
    """Return a JSON text's value.

    Raises ValueError beyond a limit, with `finite` also for NaN and infinity, with `refuse_surrogates` for lone
    surrogates.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it has {len(text)} bytes, and at most {most_bytes} are read")
    try:
        text = text if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8).decode()
        value = (FINITE if finite else ANY).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError:
        raise NotUtf8("not UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    # A text with fewer brackets cannot be deeper.
    if text.count("[") + text.count("{") > MOST_LEVELS:
        check_levels(value)
    if refuse_surrogates and SURROGATE.search(text):
        check_characters(json.dumps(value, ensure_ascii=False))
    return value


def read_json(path: Path, most_bytes: int = JSON_BYTES, finite: bool = True) -> Any:
    """Return the value of a JSON file.

    Raises UserError, with the file's name, as `parse_json` and for an unreadable file.
    """
    try:
        return parse_json(read_bytes(path, most_bytes), most_bytes, finite)
    except ValueError as error:
        raise UserError(f"{path} is {parse_fault('JSON', error)}") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes. Raises ValueError for more than `most` bytes, and UserError for an unreadable file."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
            size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise ValueError(f"it has {max(size, len(content))} bytes, and at most {most} are read")
    return content


def parse_fault(kind: str, error: ValueError) -> str:
    """Return the end of a message "FILE is ..." about a text that could not be parsed."""
    return str(error) if isinstance(error, NotUtf8) else f"not {kind}: {error}"


def check_characters(text: str) -> None:
    """Raise ValueError for a text with a lone surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start : error.start + 1]).strip("'")
        raise ValueError(f"it has half of a character, {half}; write whole characters") from None


def check_levels(value: Any) -> None:
    """Raise ValueError for lists and dicts nested deeper than MOST_LEVELS, or containing themselves."""
    layer = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MOST_LEVELS + 1):
        children = (node.values() if isinstance(node, dict) else node for node in layer)
        layer = [part for parts in children for part in parts if isinstance(part, dict | list | tuple)]
        if not layer:
            return
    raise ValueError(TOO_DEEP)


def finite_float(text: str) -> float:
    """Return the number. Raises ValueError for a number beyond double precision."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is beyond the numbers of double precision; write a smaller one")
    return number


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinity, which are not JSON."""
    raise ValueError(f"{name} is not a JSON value; write null")


FINITE = json.JSONDecoder(parse_float=finite_float, parse_constant=refuse_constant)
ANY = json.JSONDecoder()


class NotUtf8(ValueError):
    """Bytes that are not UTF-8."""


def check_events(text: str) -> None:
    """Raise ValueError for a YAML text that is too long, too deep, or too long after alias expansion.

    The parser's events are checked before values are constructed, because each use of an alias constructs its value
    again.
    """
    if len(text) > YAML_BYTES:
        raise ValueError(f"it has {len(text)} characters, and at most {YAML_BYTES} are read")
    check_characters(text)
    sizes: dict[str, int] = {}
    # For each open list or mapping: its anchor, and the number of its values after alias expansion.
    anchors, counts = list[str | None]([None]), [1]
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            counts.append(1)
            if len(counts) > MOST_LEVELS + 1:
                raise ValueError(TOO_DEEP)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, count = anchors.pop(), counts.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors:
                raise ValueError(f"the alias *{event.anchor} contains itself")
            anchor, count = None, sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            anchor, count = event.anchor, 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = count
        counts[-1] += count
        if counts[-1] > YAML_VALUES:
            raise ValueError(f"it has more than {YAML_VALUES} values, with its aliases written out")


def texts_and_numbers(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every text and number in nested values, keys included, with its dotted key."""
    if isinstance(value, dict):
        for name, part in value.items():
            inner = f"{key}.{name}" if key else str(name)
            yield inner, name
            yield from texts_and_numbers(part, inner)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from texts_and_numbers(part, f"{key}.{number}")
    elif isinstance(value, str | int | float):
        yield key, value


def flat(tree: Mapping[str, Any], leaves: tuple[str, ...] = (), section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of nested mappings.

    A mapping is a value if it is empty or its key ends with one of `leaves`.
    """
    for name, value in tree.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value and not key.endswith(leaves):
            yield from flat(value, leaves, f"{key}.")
        else:
            yield key, value


COLON_WITHOUT_SPACE = re.compile(r"([A-Za-z_][\w.-]*):(\S.*)")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Raises UserError, with the line number, for other bytes.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8; save the file as UTF-8") from None


def parse_yaml(text: str, source: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return a YAML text's value; `source` names it in messages. Raises UserError for bad syntax, and a key twice or
    without a space.
    """
    try:
        check_events(text)
        reader = type("Reader", (_EachKeyOnce, loader), {"place": source})(text)
        try:
            return reader.get_single_data()
        finally:
            reader.dispose()
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}," if error.problem_mark and "\n" in text.strip() else ""
        raise UserError(f"{source}{where} is not YAML: {error.problem}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file. Raises UserError as `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


class _EachKeyOnce(yaml.SafeLoader):
    """A YAML loader that refuses mappings in which PyYAML would silently drop or misread a key."""

    place = ""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"lines {lines[key.value]} and {line}" if line != lines[key.value] else f"line {line}"
                raise UserError(f"{self.place}: the key {key.value!r} is there twice, in {where}; keep one of them")
            lines[key.value] = line
            joined = COLON_WITHOUT_SPACE.fullmatch(key.value) if key.style is None else None
            if joined and isinstance(value, yaml.ScalarNode) and not value.value:
                name, rest = joined.groups()
                raise UserError(
                    f"{self.place}: {key.value!r} is one word to YAML, which wants a space behind the colon; write "
                    f"{name}: {rest}"
                )
        return super().construct_mapping(node, deep)

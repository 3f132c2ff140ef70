"""Reading of users' YAML and text files: always UTF-8, no duplicate keys, errors of one line.

file ──read_text──▶ text ──parse_yaml──▶ tree
"""

import codecs
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from braidrl.errors import UserError
from braidrl.parsing import check_events

COLON_WITHOUT_SPACE = re.compile(r"([A-Za-z_][\w.-]*):(\S.*)")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without its byte order mark. Raises UserError, with the line number, for other bytes."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8; save the file as UTF-8") from None


def parse_yaml(text: str, place: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the value of a YAML text.

    Args:
        text: The text.
        place: Its file or override, for messages.
        loader: A loader class with special resolvers.

    Raises:
        UserError: The text is not YAML, has a duplicate key, or has a colon without a space after it in a key.
    """
    try:
        check_events(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{place} is not YAML: {' '.join(str(error).split())}") from None
    reader = type("Reader", (_EachKeyOnce, loader), {"place": place})(text)
    try:
        return reader.get_single_data()
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{place} is not YAML: {' '.join(str(error).split())}") from None
    finally:
        reader.dispose()


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
                    f"{self.place}: {key.value!r} is one word to YAML, which wants a space behind the colon; write {name}: {rest}"
                )
        return super().construct_mapping(node, deep)

"""Answers of untrusted code as plain, bounded data, and its texts without control characters."""

import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Answerer = Callable[[str, Any], Message | Awaitable[Message]]
"""A function that answers a request, a method and its argument."""
MOST_DEPTH = 32
"""Maximum nesting of lists and objects."""
MOST_INTEGER = 2**63
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,59}")
"""Names that may become parts of metrics and columns."""


def plain(line: bytes | bytearray) -> Any:
    """Parse a line of JSON.

    Raises ValueError for text that is not JSON, a number that is not finite, an integer beyond 64 bits, a text that is not Unicode,
    or values nested more than `MOST_DEPTH` deep.
    """
    try:
        found = json.loads(line, parse_int=_bounded)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    waiting = [(found, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        if isinstance(value, str):
            value.encode()  # a surrogate raises UnicodeEncodeError, which is a ValueError
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        elif isinstance(value, dict):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            waiting += [(part, depth + 1) for part in value]
    return found


def shown(text: str, keep: str = "") -> str:
    """Return a text for terminals and logs: control characters, except those in `keep`, become escapes."""
    return "".join(one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) >= MOST_INTEGER:
        raise ValueError(f"the integer {text[:20]} has more than 64 bits")
    return value

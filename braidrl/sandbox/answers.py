"""Bounded answers of untrusted code as plain data, and its texts without control characters."""

import re
from collections.abc import Callable, Coroutine
from typing import Any

from braidrl.errors import printable

Message = dict[str, Any]
Answering = Coroutine[Any, Any, Message]
Answerer = Callable[[str, Any], Message | Answering]
"""A function that answers a request, a method and its argument."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,59}")
"""Names that may become parts of metrics and columns."""
DETAIL_LENGTH = 600


def checked_answer(line: bytes | bytearray) -> Message:
    """Parse a line of JSON, an answer or a failure.

    A line that is not an object, is nested too deeply, or has a number that is not finite becomes a failure.
    """
    from braidrl.parsing import parse_json  # here: only the run needs it, not the processes of the code

    try:
        answer = parse_json(bytes(line))
    except ValueError as error:
        answer = str(error)[:100]
    if not isinstance(answer, dict):
        detail = f"its process gave an answer that is not plain data: {printable(str(answer)[:100])}"
        return {"failure": "result", "detail": detail}
    if "failure" not in answer:
        return answer
    reason, where = answer["failure"], str(answer.get("where", ""))
    failure = {
        "failure": reason if isinstance(reason, str) and NAME.fullmatch(reason) else "result",
        "detail": printable(str(answer.get("detail"))[:DETAIL_LENGTH]),
        "where": printable(where[:100]),
    }
    return failure | ({"again": True} if answer.get("again") is True else {})

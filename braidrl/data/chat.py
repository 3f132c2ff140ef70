"""Normalisation of chat messages and tools: from the forms in data files and requests to the form for chat templates.

content         text, null or absent beside calls, a list of {type: text, text}     ──▶ text
arguments       an object, or its JSON as text (OpenAI)                             ──▶ an object
nulls           null means the same as absent                                       ──▶ absent
"""

from collections.abc import Mapping, Sequence
from typing import Any

from braidrl.errors import UserError
from braidrl.parsing import parse_json

ChatMessage = dict[str, Any]
TEMPLATE = "chat_template_kwargs"
"""The field of `metadata` with a row's arguments of the chat template."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""


def normal_message(message: Mapping[str, Any]) -> ChatMessage:
    """Return a message in the form for chat templates. Raises UserError for calls whose arguments are not JSON."""
    known = {name: value for name, value in message.items() if value is not None}
    # Templates test only whether the name exists.
    calls = known.pop("tool_calls", None)
    content = known.get("content", "")
    if isinstance(content, list) and content:
        texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        # Content with other parts is unchanged.
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content
    normal = {**known, "content": content}
    if not calls:
        return normal
    normal["tool_calls"] = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise UserError(f"a call of a tool is an object with `function`, not {call!r}")
        is_nested = isinstance(call.get("function"), Mapping)
        function = call["function"] if is_nested else call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments) if arguments.strip() else {}
            except ValueError:
                name = function.get("name")
                fault = f"the arguments of a call of {name!r} are not JSON: {arguments[:80]!r}; write an object"
                raise UserError(fault) from None
        function = {**function, "arguments": {} if arguments is None else arguments}
        normal["tool_calls"].append({**call, "function": function} if is_nested else function)
    return normal


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools in a value: a list of objects, or the same as JSON text. Null gives an empty list, anything else None."""
    if value in (None, "", []):
        return []
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    found = isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    return value if found else None

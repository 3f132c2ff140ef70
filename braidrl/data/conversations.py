"""Conversations in records, in the forms of several data sets, as chat messages for templates.

{role, content} ─┐
{from, value}   ─┼─ check_messages ─▶ [{role, content, tool_calls}, ...]
a JSON text     ─┘
"""

from typing import Any

from braidrl.data.chat import ChatMessage, is_trained, normal_message
from braidrl.data.images import IMAGE
from braidrl.data.records import Record, kind_of
from braidrl.errors import UserError, located, suggest
from braidrl.parsing import parse_json

Prompt = str | list[ChatMessage]
Response = str | list[ChatMessage]
"""Text, or the rest of a conversation, which starts with an assistant's turn."""
CALLS = ("function_call", "tool_call")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    **dict.fromkeys(CALLS, "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function_response", "function"), "tool"),
    **{role: role for role in ROLES},
}
"""Roles of messages in the form {from, value}. The value of a call is JSON: {name, arguments}, or a list of these."""


def sharegpt_message(message: Record) -> ChatMessage:
    """Return a message {from, value} as {role, content}. Raises UserError for unknown roles and calls without JSON."""
    speaker, content = message["from"], message.get("value")
    if speaker not in SHAREGPT:
        raise UserError(
            f"from={speaker!r} is an unknown role; {suggest(speaker, SHAREGPT)} Write it, or a `convert` of your own"
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    if speaker not in CALLS:
        return {**others, "role": SHAREGPT[speaker], "content": content}
    try:
        calls = parse_json(content) if isinstance(content, str) else content
    except ValueError as error:
        raise UserError(f"the call is not JSON: {error}; write {{name, arguments}}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f"the call is {kind_of(content)} without a name; write {{name, arguments}}")
    functions = [{"type": "function", "function": call} for call in calls]
    return {**others, "role": "assistant", "content": None, "tool_calls": functions}


def check_messages(where: str, field: str, messages: list[Any]) -> list[ChatMessage]:
    """Return chat messages in the form for templates. Raises UserError for a message without a role or without text."""
    normal = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {number} of {field!r} is {kind_of(message)}; write {{role, content}}")
        with located(f"{where}: message {number} of {field!r}"):
            if isinstance(message.get("from"), str) and "role" not in message:
                message = sharegpt_message(message)
            normalized = normal_message(message)
            is_trained(normalized)
        if message.get("content") is None and not normalized.get("tool_calls"):
            normalized.pop("content")
        content = normalized.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if others := sorted({str(part.get("type")) for part in parts} - {"text", IMAGE}):
            raise UserError(
                f"{where}: 'content' of message {number} of {field!r} has parts of type {', '.join(others)}; "
                "only text and images are read: leave other parts out, as in a `convert` of your own"
            )
        if any(part["type"] == "text" and not isinstance(part.get("text"), str) for part in parts):
            raise UserError(f"{where}: a part of message {number} of {field!r} has no text; write {{type, text}}")
        has_images = len(parts) and len(parts) == len(content or ()) and any(part["type"] == IMAGE for part in parts)
        for key in ("role",) if has_images else ("role", "content"):
            if not isinstance(normalized.get(key), str):
                fault = f"is {kind_of(normalized[key])}" if normalized.get(key) is not None else "is missing"
                raise UserError(f"{where}: {key!r} of message {number} of {field!r} {fault}; write text")
        normal.append(normalized)
    return normal


def check_response(where: str, field: str, response: Any) -> Response:
    """Return the response. Raises UserError unless it is text, or messages."""
    if isinstance(response, dict) and is_answer(response):
        response = [response]
    if isinstance(response, list) and response and all(isinstance(message, dict) for message in response):
        return check_messages(where, field, response)
    if not isinstance(response, str):
        raise UserError(f"{where}: {field!r} is {kind_of(response)}; write the response as text")
    return response


def is_answer(message: Any) -> bool:
    """Return True for an assistant's message, in either form."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return SHAREGPT.get(str(role), role) == "assistant"


def messages_in(text: str) -> list[Record]:
    """Return the messages in a JSON text; an empty list for any other text."""
    if not text.lstrip().startswith("["):
        return []
    try:
        read = parse_json(text)
    except ValueError:
        return []
    forms = ({"role", "content"}, {"from", "value"})
    is_conversation = isinstance(read, list) and all(
        isinstance(message, dict) and any(form <= message.keys() for form in forms) for message in read
    )
    return read if is_conversation else []

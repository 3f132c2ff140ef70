"""OpenAI's Responses API as pure functions: items become the messages of a chat, and a turn becomes items.

input: message, function_call, function_call_output ──▶ messages          turn ──▶ output: message, function_call
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from braidrl.agents.openai_api import Protocol, TurnReply, TurnRequest, check_message, event, read_common, tools_of
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

TEXTS = ("input_text", "output_text", "text")


def read_response(body: Mapping[str, Any]) -> TurnRequest:
    """Read a request. Raises UserError for unsupported fields."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise UserError("`input` must be a text, or a list of items")
    instructions, previous = body.get("instructions"), body.get("previous_response_id")
    if not isinstance(instructions, str | None) or not isinstance(previous, str | None):
        raise UserError("`instructions` and `previous_response_id` must be texts")
    messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        take(item, messages)
    for message in messages:
        check_message(message)
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools_of(body)
    ]
    return read_common(body, messages=messages, tools=tools, previous=previous)


def take(item: Any, messages: list[ChatMessage]) -> None:
    """Add an item to the messages; a turn's calls belong to its message. Raises UserError for an unsupported item."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": content_of(item.get("content"))})
    elif kind == "function_call" and all(isinstance(item.get(key), str) for key in ("call_id", "name", "arguments")):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output" and isinstance(item.get("call_id"), str):
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content_of(item.get("output"))})
    elif kind != "reasoning":
        raise UserError(
            f"an item of `input` is a message, a function_call or a function_call_output, not {shown(item)}"
        )


def content_of(content: Any) -> Any:
    """Return an item's text; other content is returned unchanged, for the check of messages to refuse."""
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") in TEXTS for p in content):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def response_whole(asked: TurnRequest, answered: TurnReply) -> dict[str, Any]:
    """Return a response."""
    whole = answered.reason != "length"
    counts = {
        "input_tokens": answered.prompt,
        "output_tokens": answered.sampled,
        "total_tokens": answered.prompt + answered.sampled,
    }
    items: list[dict[str, Any]] = []
    if answered.text or not answered.calls:
        part = {"type": "output_text", "text": answered.text, "annotations": []}
        items.append(
            {
                "id": f"{answered.name}-text",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in answered.calls:
        own = {"id": f"{answered.name}-{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append({"type": "function_call", **own, **call["function"]})
    return {
        "id": answered.name, "object": "response", "created_at": int(time.time()), "model": asked.model, "error": None,
        "status": "completed" if whole else "incomplete", "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": items, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "usage": counts,
        "previous_response_id": asked.previous,
    }  # fmt: skip


def response_delta(asked: TurnRequest, name: str, pieces: Sequence[str]) -> Iterator[str]:
    """Yield the events with the last piece of a text; events that open the response and its message precede the first piece."""
    if len(pieces) == 1:
        yield from every_event(asked, TurnReply(name, {"content": pieces[0]}, "stop", 0, 0), pieces)[
            : events_sent(pieces)
        ]
    else:
        place = {"item_id": f"{name}-text", "output_index": 0, "content_index": 0}
        yield numbered(
            events_sent(pieces) - 1, "response.output_text.delta", {**place, "delta": pieces[-1], "logprobs": []}
        )


def response_events(asked: TurnRequest, answered: TurnReply, pieces: Sequence[str] = ()) -> Iterator[str]:
    """Yield the events of a response after the pieces already sent."""
    yield from every_event(asked, answered, pieces)[events_sent(pieces) :]


def events_sent(pieces: Sequence[str]) -> int:
    """Return the number of events for these pieces: one each, after the three that open the response and its message."""
    return len(pieces) and 3 + len(pieces)


def every_event(asked: TurnRequest, answered: TurnReply, pieces: Sequence[str]) -> list[str]:
    """Return a response as numbered events."""
    whole = response_whole(asked, answered)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    last = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    found = [("response.created", {"response": begun}), *changes(whole["output"], pieces), (last, {"response": whole})]
    return [numbered(number, kind, data) for number, (kind, data) in enumerate(found)]


def numbered(number: int, kind: str, data: Mapping[str, Any]) -> str:
    """Return an event of a response, with its number."""
    return event({"type": kind, "sequence_number": number, **data}, kind)


def changes(items: list[dict[str, Any]], pieces: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of each item: added, growing, done. `pieces` are pieces of a message's text, perhaps not all."""
    for number, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": number}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "response.output_item.added", {"output_index": number, "item": {**item, **empty, "status": "in_progress"}}
        if item["type"] == "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            rest = part["text"][len("".join(pieces)) :]
            for piece in (*pieces, rest) if rest or not pieces else pieces:
                yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield (
                "response.function_call_arguments.done",
                {**place, "arguments": item["arguments"], "name": item["name"]},
            )
        yield "response.output_item.done", {"output_index": number, "item": item}


RESPONSES = Protocol(read_response, response_whole, response_delta, response_events)

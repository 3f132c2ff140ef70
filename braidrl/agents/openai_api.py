"""OpenAI's API as pure functions: requests and answers of chat completions, completions and responses, whole or as events.

body ──read──▶ TurnRequest ──a turn of the row──▶ TurnReply ──whole──▶ JSON
                                │                    ──events──▶ server-sent events, the rest of them when the turn is over
                                └── text so far ─────delta───▶ server-sent events

For `responses`, items (message, function_call, function_call_output) become the messages of a chat, and a turn becomes items.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.agents.tool_calls import call_id, parse_tool_calls
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

UNSUPPORTED = (
    "logprobs", "top_logprobs", "functions", "function_call", "logit_bias", "audio", "prediction", "echo", "suffix", "background",
)  # fmt: skip
"""Fields that are not supported; a value that requests nothing, such as `echo: false`, is accepted."""
USUAL = {
    "response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "n": 1, "best_of": 1,
    "text": {"format": {"type": "text"}}, "truncation": "disabled",
}  # fmt: skip
"""Fields that may only have this value."""
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
MODEL = "actor"
"""The name of the only model; requests may use any name."""
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class TurnRequest:
    """One request for a turn."""

    messages: list[ChatMessage]
    """The conversation; empty for `completions`."""
    prompt: str | None = None
    """The text to continue, for `completions`."""
    tools: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    counts: bool = False
    """Whether chunks end with one that counts tokens."""
    model: str = MODEL
    previous: str | None = None
    """The response that the conversation continues."""


@dataclass(frozen=True)
class TurnReply:
    """One turn of the model."""

    name: str
    """The turn's name, from the row and the turn."""
    message: ChatMessage
    """The assistant's message, in the format of chat completions."""
    reason: str
    """stop, length or tool_calls."""
    prompt: int
    """Number of tokens of the context."""
    sampled: int

    @property
    def text(self) -> str:
        """Return the turn's text without tool calls."""
        return self.message["content"] or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the turn's tool calls."""
        return self.message.get("tool_calls", [])


@dataclass(frozen=True)
class Protocol:
    """One of the API's protocols."""

    read: Callable[[Mapping[str, Any]], TurnRequest]
    """Reads a request. Raises UserError for unsupported fields."""
    whole: Callable[[TurnRequest, TurnReply], dict[str, Any]]
    delta: Callable[[TurnRequest, str, Sequence[str]], Iterator[str]]
    """Called with the turn's name and all pieces of its text so far; returns the events that send the last piece."""
    events: Callable[[TurnRequest, TurnReply, Sequence[str]], Iterator[str]]
    """Called with the pieces already sent; returns the events that complete the turn."""


def read_common(body: Mapping[str, Any], **own: Any) -> TurnRequest:
    """Read the fields that the protocols share; `own` are the protocol's own. Raises UserError for unsupported fields."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise UserError(f"{name!r} is not served here; leave it out")
    for name, usual in USUAL.items():
        if body.get(name, usual) not in (usual, None):
            more = ": each session is one row" if name == "n" else ""
            raise UserError(f"{name} must be {usual if name == 'n' else json.dumps(usual)}{more}")
    options = body.get("stream_options") or {}
    counts = isinstance(options, dict) and bool(options.get("include_usage"))
    model = body.get("model") or MODEL
    if not isinstance(model, str) or len(model) > MOST_STOP_CHARACTERS:
        raise UserError(f"model must be a name, not {shown(model)}")
    given = body.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise UserError(
            f"stop must be a text that is not empty, or a list of up to {MOST_STOPS} such, not {shown(given)}"
        )
    if any(len(each) > MOST_STOP_CHARACTERS for each in stops):
        raise UserError(f"a text of stop has at most {MOST_STOP_CHARACTERS} characters")
    return TurnRequest(
        limit=limit_of(body), stops=tuple(stops), stream=bool(body.get("stream")), counts=counts, model=model, **own
    )


def limit_of(body: Mapping[str, Any]) -> int | None:
    """Return a request's maximum number of tokens, or None. Raises UserError for a value that is not a positive integer."""
    name = next((name for name in LIMITS if body.get(name) is not None), None)
    if name is None:
        return None
    wanted = body[name]
    if (
        isinstance(wanted, bool)
        or not isinstance(wanted, int | float)
        or wanted != wanted // 1
        or not 1 <= wanted < 1 << 63
    ):
        raise UserError(f"{name} must be a whole number from 1 on, not {shown(wanted)}")
    return int(wanted)


def read_chat(body: Mapping[str, Any]) -> TurnRequest:
    """Read a request for a chat completion."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise UserError("`messages` must be a list of {role, content}")
    for message in body["messages"]:
        check_message(message)
    return read_common(body, messages=body["messages"], tools=tools_of(body))


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Return a request's tools. Raises UserError for anything but a list."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("`tools` must be a list of functions")
    return tools


def check_message(message: Any) -> None:
    """Raise UserError unless this is a message that contains only text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"a message is an object with a role, not {shown(message)}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"the content of a message is text, or a list of {{type: text, text}}, not {shown(content)}"
            )


def reply(text: str, with_tools: bool) -> ChatMessage:
    """Make the assistant's message; well-formed tool calls are parsed if the request named tools."""
    calls = [call for call in parse_tool_calls(text) if call.fault is None] if with_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    made = [
        {
            "id": call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip() or None, "tool_calls": made}


def usage(answered: TurnReply) -> dict[str, int]:
    """Return the token counts."""
    total = answered.prompt + answered.sampled
    return {"prompt_tokens": answered.prompt, "completion_tokens": answered.sampled, "total_tokens": total}


def chat_whole(asked: TurnRequest, answered: TurnReply) -> dict[str, Any]:
    """Return a chat completion."""
    choice = {"index": 0, "message": answered.message, "finish_reason": answered.reason}
    return {
        "id": answered.name, "object": "chat.completion", "created": int(time.time()), "model": asked.model, "choices": [choice],
        "usage": usage(answered),
    }  # fmt: skip


def chunk_of(asked: TurnRequest, name: str, *choices: Mapping[str, Any], **more: Any) -> str:
    """Return a chunk of a chat completion."""
    head = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": asked.model}
    return event({**head, "choices": [{"index": 0, "finish_reason": None, **choice} for choice in choices], **more})


def chat_delta(asked: TurnRequest, name: str, pieces: Sequence[str]) -> Iterator[str]:
    """Yield the chunk with the last piece of a text."""
    role = {"role": "assistant"} if len(pieces) == 1 else {}
    yield chunk_of(asked, name, {"delta": {**role, "content": pieces[-1]}})


def chat_events(asked: TurnRequest, answered: TurnReply, pieces: Sequence[str] = ()) -> Iterator[str]:
    """Yield the chunks of a chat completion after the pieces already sent."""
    name, rest = answered.name, answered.text[len("".join(pieces)) :]
    if rest or not pieces:
        yield from chat_delta(asked, name, [*pieces, rest])
    for number, call in enumerate(answered.calls):
        yield chunk_of(asked, name, {"delta": {"tool_calls": [{"index": number, **call}]}})
    yield chunk_of(asked, name, {"delta": {}, "finish_reason": answered.reason})
    if asked.counts:
        yield chunk_of(asked, name, usage=usage(answered))
    yield DONE


def read_completion(body: Mapping[str, Any]) -> TurnRequest:
    """Read a request for a completion."""
    prompt = body.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str) or not prompt:
        raise UserError("`prompt` must be one text that is not empty")
    return read_common(body, messages=[], prompt=prompt)


def completion_whole(asked: TurnRequest, answered: TurnReply) -> dict[str, Any]:
    """Return a completion."""
    choice = {"index": 0, "text": answered.text, "logprobs": None, "finish_reason": answered.reason}
    return {
        "id": answered.name, "object": "text_completion", "created": int(time.time()), "model": asked.model, "choices": [choice],
        "usage": usage(answered),
    }  # fmt: skip


def completion_delta(asked: TurnRequest, name: str, pieces: Sequence[str]) -> Iterator[str]:
    """Yield the chunk with the last piece of a text."""
    whole = completion_whole(asked, TurnReply(name, {"content": pieces[-1]}, "", 0, 0))
    del whole["usage"]
    whole["choices"][0]["finish_reason"] = None
    yield event(whole)


def completion_events(asked: TurnRequest, answered: TurnReply, pieces: Sequence[str] = ()) -> Iterator[str]:
    """Yield the chunks of a completion after the pieces already sent."""
    whole = completion_whole(asked, answered)
    counts = whole.pop("usage")
    whole["choices"][0]["text"] = answered.text[len("".join(pieces)) :]
    yield event(whole)
    if asked.counts:
        yield event({**whole, "choices": [], "usage": counts})
    yield DONE


def event(data: Mapping[str, Any], kind: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"


CHAT = Protocol(read_chat, chat_whole, chat_delta, chat_events)
COMPLETIONS = Protocol(read_completion, completion_whole, completion_delta, completion_events)


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

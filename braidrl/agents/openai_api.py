"""OpenAI's API as pure functions: requests and answers of chat completions, completions and responses, whole or as events.

body ──read──▶ TurnRequest ──a turn of the row──▶ TurnReply ──whole──▶ JSON
                                └── text so far ─────events──▶ server-sent events, the rest of them when the turn is over

For `responses`, items (message, function_call, function_call_output) become the messages of a chat, and a turn becomes items.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from braidrl.agents.tool_calls import CALL_ID, parse_tool_calls
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


@dataclass(frozen=True)
class Protocol:
    """One of the API's protocols."""

    read: Callable[[Mapping[str, Any]], TurnRequest]
    """Reads a request. Raises UserError for unsupported fields."""
    whole: Callable[[TurnRequest, TurnReply], dict[str, Any]]
    events: Callable[[TurnRequest, str, Sequence[str], TurnReply | None], Iterable[str]]
    """Called with the turn's name and the pieces of its text; returns the events that send the last piece, or given the whole turn, the
    events that complete it after these pieces."""


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
        some = f"a list of up to {MOST_STOPS} such"
        raise UserError(f"stop must be a text that is not empty, or {some}, not {shown(given)}")
    if any(len(each) > MOST_STOP_CHARACTERS for each in stops):
        raise UserError(f"a text of stop has at most {MOST_STOP_CHARACTERS} characters")
    name, limit = next(((name, body[name]) for name in LIMITS if body.get(name) is not None), ("", None))
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is not None and not (is_number and limit == limit // 1 and 1 <= limit < 1 << 63):
        raise UserError(f"{name} must be a whole number from 1 on, not {shown(limit)}")
    return TurnRequest(
        limit=None if limit is None else int(limit), stops=tuple(stops), stream=bool(body.get("stream")), counts=counts,
        model=model, **own,
    )  # fmt: skip


def read_chat(body: Mapping[str, Any], messages: list[Any] | None = None, previous: str | None = None) -> TurnRequest:
    """Read a request that continues a conversation, by default with the body's `messages`.

    Raises UserError for tools that are no list, and messages with more than text.
    """
    if messages is None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError("`messages` must be a list of {role, content}")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("`tools` must be a list of functions")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"a message is an object with a role, not {shown(message)}")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError(
                    f"the content of a message is text, or a list of {{type: text, text}}, not {shown(content)}"
                )
    return read_common(body, messages=messages, tools=tools, previous=previous)


def reply(text: str, with_tools: bool) -> ChatMessage:
    """Make the assistant's message; well-formed tool calls are parsed if the request named tools."""
    calls = [call for call in parse_tool_calls(text) if call.fault is None] if with_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    made = []
    for number, call in enumerate(calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        made.append({"id": CALL_ID.format(number), "type": "function", "function": function})
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip() or None, "tool_calls": made}


def read_completion(body: Mapping[str, Any]) -> TurnRequest:
    prompt = body.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if not isinstance(prompt, str) or not prompt:
        raise UserError("`prompt` must be one text that is not empty")
    return read_common(body, messages=[], prompt=prompt)


def completion(
    asked: TurnRequest, name: str, choice: Mapping[str, Any] | None, counted: TurnReply | None = None, chunk: str = ""
) -> dict[str, Any]:
    """Return a text completion for a request with a prompt, else a chat completion, or a `.chunk` of either.

    It has a choice, if any, and the numbers of tokens of `counted`.
    """
    kind = f"chat.completion{chunk}" if asked.prompt is None else "text_completion"
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
    made = {"id": name, "object": kind, "created": int(time.time()), "model": asked.model, "choices": choices}
    if counted is not None:
        sizes = {"prompt_tokens": counted.prompt, "completion_tokens": counted.sampled}
        made["usage"] = {**sizes, "total_tokens": counted.prompt + counted.sampled}
    return made


def completion_whole(asked: TurnRequest, answered: TurnReply) -> dict[str, Any]:
    said = {"message": answered.message} if asked.prompt is None else {"text": answered.text, "logprobs": None}
    return completion(asked, answered.name, {**said, "finish_reason": answered.reason}, answered)


def completion_events(
    asked: TurnRequest, name: str, pieces: Sequence[str], answered: TurnReply | None
) -> Iterator[str]:
    """Yield chunks of a text completion for a request with a prompt, else of a chat completion."""

    def chunk(choice: Mapping[str, Any] | None, counted: TurnReply | None = None) -> str:
        return event(completion(asked, name, choice, counted, ".chunk"))

    text = pieces[-1] if answered is None else answered.text[len("".join(pieces)) :]
    if asked.prompt is not None:
        yield chunk({"text": text, "logprobs": None, "finish_reason": None if answered is None else answered.reason})
    elif answered is None or text or not pieces:
        is_first = len(pieces) == (answered is None)
        yield chunk({"delta": {**({"role": "assistant"} if is_first else {}), "content": text}})
    if answered is None:
        return
    if asked.prompt is None:
        for number, call in enumerate(answered.message.get("tool_calls", [])):
            yield chunk({"delta": {"tool_calls": [{"index": number, **call}]}})
        yield chunk({"delta": {}, "finish_reason": answered.reason})
    if asked.counts:
        yield chunk(None, answered)
    yield DONE


def event(data: Mapping[str, Any], kind: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"


CHAT = Protocol(read_chat, completion_whole, completion_events)
COMPLETIONS = Protocol(read_completion, completion_whole, completion_events)

TEXTS = ("input_text", "output_text", "text")
ITEM_TEXTS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Texts that items of these kinds must have."""
OPENING = 3
"""Events that open a response and its message, before one for each piece of its text."""


def read_response(body: Mapping[str, Any]) -> TurnRequest:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise UserError("`input` must be a text, or a list of items")
    instructions, previous = body.get("instructions"), body.get("previous_response_id")
    if not isinstance(instructions, str | None) or not isinstance(previous, str | None):
        raise UserError("`instructions` and `previous_response_id` must be texts")
    messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        keys = ITEM_TEXTS.get(str(kind), ())
        if kind not in ("message", "reasoning") and not (keys and all(isinstance(item.get(key), str) for key in keys)):
            raise UserError(
                f"an item of `input` is a message, a function_call or a function_call_output, not {shown(item)}"
            )
        if kind == "message":
            messages.append({"role": item.get("role"), "content": content_of(item.get("content"))})
        elif kind == "function_call_output":
            result = content_of(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
        elif kind == "function_call":
            # A turn's calls belong to its message.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    asked = read_chat(body, messages, previous)
    functions = [{name: value for name, value in tool.items() if name != "type"} for tool in asked.tools]
    return replace(asked, tools=[{"type": "function", "function": each} for each in functions])


def content_of(content: Any) -> Any:
    """Return an item's text; other content is returned unchanged, for the check of messages to refuse."""
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") in TEXTS for p in content):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def response_whole(asked: TurnRequest, answered: TurnReply) -> dict[str, Any]:
    whole = answered.reason != "length"
    total = answered.prompt + answered.sampled
    counts = {"input_tokens": answered.prompt, "output_tokens": answered.sampled, "total_tokens": total}
    items: list[dict[str, Any]] = []
    calls = answered.message.get("tool_calls", [])
    if answered.text or not calls:
        own = {"id": f"{answered.name}-text", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**own, "content": [{"type": "output_text", "text": answered.text, "annotations": []}]})
    for call in calls:
        own = {"id": f"{answered.name}-{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append({"type": "function_call", **own, **call["function"]})
    return {
        "id": answered.name, "object": "response", "created_at": int(time.time()), "model": asked.model, "error": None,
        "status": "completed" if whole else "incomplete", "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": items, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "usage": counts,
        "previous_response_id": asked.previous,
    }  # fmt: skip


def response_events(asked: TurnRequest, name: str, pieces: Sequence[str], answered: TurnReply | None) -> list[str]:
    """Return numbered events, of each item: added, growing, done. Those that open the response precede the first piece of its text."""
    if answered is None and len(pieces) == 1:
        opened = TurnReply(name, {"content": pieces[0]}, "stop", 0, 0)
        return response_events(asked, name, (), opened)[: OPENING + 1]
    events = list[str]()

    def add(kind: str, **data: Any) -> None:
        kind = f"response.{kind}"
        events.append(event({"type": kind, "sequence_number": len(events), **data}, kind))

    if answered is None:
        place = {"item_id": f"{name}-text", "output_index": 0, "content_index": 0}
        number = OPENING + len(pieces) - 1
        add("output_text.delta", sequence_number=number, **place, delta=pieces[-1], logprobs=[])
        return events
    whole = response_whole(asked, answered)
    add("created", response={**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None})
    for number, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": number}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        add("output_item.added", output_index=number, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            add("content_part.added", **place, part={**part, "text": ""})
            rest = part["text"][len("".join(pieces)) :]
            for piece in (*pieces, rest) if rest or not pieces else pieces:
                add("output_text.delta", **place, delta=piece, logprobs=[])
            add("output_text.done", **place, text=part["text"], logprobs=[])
            add("content_part.done", **place, part=part)
        else:
            add("function_call_arguments.delta", **place, delta=item["arguments"])
            add("function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        add("output_item.done", output_index=number, item=item)
    add(whole["status"], response=whole)
    return events[OPENING + len(pieces) if pieces else 0 :]


RESPONSES = Protocol(read_response, response_whole, response_events)

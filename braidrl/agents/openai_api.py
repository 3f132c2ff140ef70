"""OpenAI's chat completions as pure functions: requests, and answers, whole or as events.

body ──read──▶ TurnRequest ──a turn of the row──▶ TurnReply ─completion──▶ JSON
                                └── text so far ─────events─▶ server-sent events, the rest of them when the turn is over
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.agents.tool_calls import CALL_ID, parse_tool_calls
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

UNSUPPORTED = ("logprobs", "top_logprobs", "functions", "function_call", "logit_bias", "audio", "prediction")
"""Fields that are not supported; a value that requests nothing, such as `logprobs: false`, is accepted."""
USUAL = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "n": 1}
"""Fields that may only have this value."""
LIMITS = ("max_completion_tokens", "max_tokens")
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
MODEL = "actor"
"""The name of the only model; requests may use any name."""
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class TurnRequest:
    """One request for a turn."""

    messages: list[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    counts: bool = False
    """Whether chunks end with one that counts tokens."""
    model: str = MODEL


@dataclass(frozen=True)
class TurnReply:
    """One turn of the model."""

    name: str
    """The turn's name, from the row and the turn."""
    message: ChatMessage
    reason: str
    """stop, length or tool_calls."""
    prompt: int
    """Number of tokens of the context."""
    sampled: int


def read(body: Mapping[str, Any]) -> TurnRequest:
    """Read a request.

    Raises UserError for unsupported fields, tools that are no list, and messages with more than text.
    """
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise UserError("`messages` must be a list of {role, content}")
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
        messages, tools, None if limit is None else int(limit), tuple(stops), bool(body.get("stream")), counts, model
    )


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


def completion(
    asked: TurnRequest, name: str, choice: Mapping[str, Any] | None, counted: TurnReply | None = None, chunk: str = ""
) -> dict[str, Any]:
    """Return a chat completion, or a `.chunk` of one, with a choice, if any, and the numbers of tokens of `counted`."""
    made: dict[str, Any] = {
        "id": name,
        "object": f"chat.completion{chunk}",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [] if choice is None else [{"index": 0, "finish_reason": None, **choice}],
    }
    if counted is not None:
        sizes = {"prompt_tokens": counted.prompt, "completion_tokens": counted.sampled}
        made["usage"] = {**sizes, "total_tokens": counted.prompt + counted.sampled}
    return made


def events(asked: TurnRequest, name: str, pieces: Sequence[str], answered: TurnReply | None) -> Iterator[str]:
    """Yield the event that sends the last of the pieces of a turn's text, or given the whole turn, the events that
    complete it.
    """

    def chunk(choice: Mapping[str, Any] | None, counted: TurnReply | None = None) -> str:
        return event(completion(asked, name, choice, counted, ".chunk"))

    text = pieces[-1] if answered is None else (answered.message["content"] or "")[len("".join(pieces)) :]
    if answered is None or text or not pieces:
        is_first = len(pieces) == (answered is None)
        yield chunk({"delta": {**({"role": "assistant"} if is_first else {}), "content": text}})
    if answered is None:
        return
    for number, call in enumerate(answered.message.get("tool_calls", [])):
        yield chunk({"delta": {"tool_calls": [{"index": number, **call}]}})
    yield chunk({"delta": {}, "finish_reason": answered.reason})
    if asked.counts:
        yield chunk(None, answered)
    yield DONE


def event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"

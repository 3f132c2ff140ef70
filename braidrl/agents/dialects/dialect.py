"""The form of an API that an agent calls, and the shared parts of the APIs: requests, replies, limits, and reasoning.

body ──read──▶ TurnRequest ──the model's turns, one for each choice──▶ TurnReply ──answer──▶ JSON
                                     └── pieces of text ──stream──▶ server-sent events
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.agents.tool_calls import CALL_ID, parse_tool_calls
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

Json = Mapping[str, Any]

MODEL = "actor"
"""The name of the only model; requests may use any name."""
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256
MOST_CHOICES = 8
"""Limit on a request's choices: each is a sequence of the row."""
THINK, END_OF_THINKING = "<think>", "</think>"
SIGNATURE = "braid:"
"""The beginning of a reasoning block's signature; the tags that were around the reasoning follow."""


@dataclass(frozen=True)
class TurnRequest:
    """One request for the model's next turn."""

    context: list[ChatMessage] | str | list[int]
    """The conversation: messages, a text that is not rendered, or token ids."""
    tools: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    """Limit on the turn's tokens; None means the run's."""
    stops: tuple[str, ...] = ()
    stream: bool = False
    counts: bool = False
    """True if the events of a stream end with one that counts tokens."""
    model: str = MODEL
    choices: int = 1
    """The number of alternative turns."""
    shows_tokens: bool = False
    """True if the answer also has token ids."""


@dataclass(frozen=True)
class TurnReply:
    """One turn of the model."""

    name: str
    """The turn's name, from the row and the turn."""
    message: ChatMessage
    """The assistant's message, in OpenAI's form."""
    reason: str
    """stop, length or tool_calls."""
    context: Sequence[int]
    """Token ids of the context."""
    tokens: Sequence[int]
    """Sampled token ids, including the end of sequence."""
    log_probs: Sequence[float] = ()
    stop: str | None = None
    """The text of `TurnRequest.stops` that ended the turn."""
    opened: bool = False
    """True if the context ends within reasoning, which the chat template has opened."""

    @property
    def text(self) -> str:
        return self.message["content"] or ""


class TurnEvents(ABC):
    """The server-sent events of one answer, in order; each method yields the next events."""

    keep_alive = ": the turn is under way\n\n"
    """Sent from time to time when there is no other event."""

    def __init__(self, request: TurnRequest, name: str, context: int, opened: bool) -> None:
        """Store the name of the first turn, the number of its context's tokens, and whether that ends in reasoning."""
        self.request, self.name, self.context, self.opened = request, name, context, opened
        self.sent = ""
        """The text that is sent of the current choice."""

    def begin(self) -> Iterator[str]:
        """Yield the events before the first choice."""
        yield from ()

    @abstractmethod
    def piece(self, index: int, text: str) -> Iterator[str]:
        """Yield the events for the next piece of a choice's text."""

    @abstractmethod
    def end(self, index: int, reply: TurnReply) -> Iterator[str]:
        """Yield the events that complete a choice."""

    @abstractmethod
    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        """Yield the events after the last choice."""

    def failed(self, message: str) -> Iterator[str]:
        """Yield the event of a turn that failed after the first event was sent."""
        yield event({"error": {"message": message}})


@dataclass(frozen=True)
class ChatDialect:
    """An API for agents.

    All functions are pure; the endpoint generates the turns between them.
    """

    path: str
    """The path of turns, below a session's address."""
    read: Callable[[Json], TurnRequest]
    """Reads a body. Raises UserError for unsupported requests."""
    answer: Callable[[TurnRequest, Sequence[TurnReply]], Json]
    """Makes an answer of all choices."""
    events: type[TurnEvents]
    """Makes the events of an answer that is streamed."""
    error: Callable[[int, str], Json]
    """Makes the body of an error of an HTTP status."""
    counted: Callable[[int], Json] | None = None
    """Makes the answer to a request that counts a context's tokens at `path/count_tokens`; None if there is none."""


def event(data: Json, name: str | None = None) -> str:
    """Return a server-sent event, with a name if it has one."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n" if name else f"data: {json.dumps(data)}\n\n"


def message_of(text: str, with_tools: bool) -> ChatMessage:
    """Make the assistant's message; well-formed tool calls are parsed if the request has tools."""
    calls = [call for call in parse_tool_calls(text) if call.fault is None] if with_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    tool_calls = [
        call_of(CALL_ID.format(number), call.name, json.dumps(call.arguments)) for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip() or None, "tool_calls": tool_calls}


def call_of(name_of_call: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": name_of_call, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form of chat templates. Raises UserError for one without a name."""
    if not isinstance(name, str) or not name:
        raise UserError(f"a tool has a name, not {shown(name)}")
    described = {"description": description} if description else {}
    function = {"name": name, **described, "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


# Parts shared by requests of several APIs.


def read_model(body: Json) -> str:
    model = body.get("model") or MODEL
    if not isinstance(model, str) or len(model) > MOST_STOP_CHARACTERS:
        raise UserError(f"model must be a name, not {shown(model)}")
    return model


def read_limit(body: Json, *names: str) -> int | None:
    """Return the limit on tokens, by the first of the names that has one."""
    name, limit = next(((name, body[name]) for name in names if body.get(name) is not None), ("", None))
    return None if limit is None else whole_number(name, limit)


def read_choices(body: Json) -> int:
    choices = 1 if body.get("n") is None else whole_number("n", body["n"])
    if choices > MOST_CHOICES:
        raise UserError(f"n must be at most {MOST_CHOICES}, since each choice is a sequence of the row; got {choices}")
    return choices


def whole_number(name: str, value: Any) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and value == value // 1 and 1 <= value < 1 << 63):
        raise UserError(f"{name} must be a whole number from 1 on, not {shown(value)}")
    return int(value)


def read_stops(body: Json, name: str) -> tuple[str, ...]:
    """Return the stop texts of a field: none, one text, or a list."""
    value = body.get(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        expected = f"a list of up to {MOST_STOPS} such"
        raise UserError(f"{name} must be a text that is not empty, or {expected}, not {shown(value)}")
    if any(len(stop) > MOST_STOP_CHARACTERS for stop in stops):
        raise UserError(f"a text of {name} has at most {MOST_STOP_CHARACTERS} characters")
    return tuple(stops)


def refuse(body: Json, unsupported: Sequence[str], usual: Mapping[str, Any] | None = None) -> None:
    """Raise UserError for unsupported fields, and for values other than those in `usual`.

    A value that requests nothing, such as `logprobs: false`, is accepted.
    """
    for name in unsupported:
        if body.get(name):
            raise UserError(f"{name!r} is not served here; leave it out")
    for name, value in (usual or {}).items():
        if body.get(name, value) not in (value, None):
            raise UserError(f"{name} must be {json.dumps(value)}")


def read_objects(body: Json, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty if there is none."""
    objects = body.get(name) or []
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise UserError(f"`{name}` must be a list of {'functions' if name == 'tools' else 'objects'}")
    return objects


# Reasoning, which some APIs return separately from the text. Clients send both back, and joined they are the model's
# text.


@dataclass(frozen=True)
class Reasoning:
    """A turn's text in two parts."""

    thought: str | None
    text: str
    signature: str = ""
    """The tags around the thought, with which `joined` makes the text again."""


def split_reasoning(text: str, opened: bool, is_over: bool = True) -> Reasoning:
    """Split a turn's text into the reasoning between its tags, if any, and the remaining text.

    `opened` means that the context ends within reasoning. For an unfinished turn, characters that may belong to a tag
    are omitted.
    """
    before = "" if opened else THINK
    if not opened and not text.startswith(THINK):
        is_tag = not is_over and THINK.startswith(text)
        return Reasoning(None, "" if is_tag else text)
    thought, end, rest = text.removeprefix(before).partition(END_OF_THINKING)
    if not end and not is_over:
        partial_tag = next(
            (n for n in range(len(END_OF_THINKING) - 1, 0, -1) if thought.endswith(END_OF_THINKING[:n])), 0
        )
        thought = thought[: len(thought) - partial_tag]
    return Reasoning(thought, rest, f"{SIGNATURE}{before}{end}")


def joined(thought: str, signature: Any) -> str:
    """Return the text of a reasoning block, with the tags that its signature names."""
    is_ours = isinstance(signature, str) and signature.startswith(SIGNATURE)
    tags = signature.removeprefix(SIGNATURE) if is_ours else THINK + END_OF_THINKING
    opening, closing = THINK * tags.startswith(THINK), END_OF_THINKING * tags.endswith(END_OF_THINKING)
    return f"{opening}{thought}{closing}"


class BlockEvents(TurnEvents):
    """The events of an answer with consecutive parts: a thought, text, and tool calls."""

    def __init__(self, request: TurnRequest, name: str, context: int, opened: bool) -> None:
        super().__init__(request, name, context, opened)
        self.number = 0
        """The number of parts that are complete."""
        self._lengths: dict[str, int] = {}
        """Characters that are sent of each part that has begun."""
        self._current: str | None = None

    @abstractmethod
    def start(self, kind: str) -> Iterator[str]:
        """Yield the events that begin a part, `thought` or `text`."""

    @abstractmethod
    def delta(self, kind: str, text: str) -> Iterator[str]:
        """Yield the event of a part's next piece."""

    @abstractmethod
    def stop(self, kind: str, parts: Reasoning) -> Iterator[str]:
        """Yield the events that complete a part."""

    @abstractmethod
    def call(self, call: Json) -> Iterator[str]:
        """Yield the events of a tool call."""

    def piece(self, index: int, text: str) -> Iterator[str]:
        self.sent += text
        yield from self._grow(split_reasoning(self.sent, self.opened, is_over=False))

    def end(self, index: int, reply: TurnReply) -> Iterator[str]:
        parts = split_reasoning(reply.text, reply.opened)
        yield from self._grow(parts)
        yield from self._complete(parts)
        for call in reply.message.get("tool_calls", []):
            yield from self.call(call)
            self.number += 1

    def _grow(self, parts: Reasoning) -> Iterator[str]:
        for kind, text in (("thought", parts.thought), ("said", parts.text or None)):
            if text is None:
                continue
            if kind not in self._lengths:
                yield from self._complete(parts)
                yield from self.start(kind)
                self._current = kind
            if new := text[self._lengths.get(kind, 0) :]:
                yield from self.delta(kind, new)
            self._lengths[kind] = len(text)

    def _complete(self, parts: Reasoning) -> Iterator[str]:
        if self._current is not None:
            yield from self.stop(self._current, parts)
            self._current, self.number = None, self.number + 1

"""OpenAI's chat completions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from braidrl.agents.dialects.dialect import (
    ChatDialect,
    Json,
    TurnEvents,
    TurnReply,
    TurnRequest,
    event,
    read_choices,
    read_limit,
    read_model,
    read_objects,
    read_stops,
    refuse,
)
from braidrl.errors import UserError, shown

UNSUPPORTED = ("logprobs", "top_logprobs", "functions", "function_call", "logit_bias", "audio", "prediction")
USUAL = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"]}
"""Fields that may only have this value."""
LIMITS = ("max_completion_tokens", "max_tokens")
DONE = "data: [DONE]\n\n"


def read(body: Json) -> TurnRequest:
    """Read a request.

    Raises UserError for unsupported fields, tools that are not a list, and content other than text and images.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError("`messages` must be a list of {role, content}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"a message is an object with a role, not {shown(message)}")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in parts:
            if not isinstance(part, dict) or not (
                is_image(part) or (part.get("type") == "text" and isinstance(part.get("text"), str))
            ):
                raise UserError(
                    "the content of a message is text, or a list of {type: text, text} and {type: image_url, "
                    f"image_url: {{url: data:...}}}}, not {shown(content)}"
                )
    tools = read_objects(body, "tools")
    refuse(body, UNSUPPORTED, USUAL)
    return TurnRequest(
        messages,
        tools,
        read_limit(body, *LIMITS),
        read_stops(body, "stop"),
        bool(body.get("stream")),
        counts_tokens(body),
        read_model(body),
        read_choices(body),
    )


def is_image(part: Json) -> bool:
    """Return True if a part of a message is an image as a data: URI; a client cannot name files of this machine."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return part.get("type") == "image_url" and isinstance(url, str) and url.startswith("data:")


def counts_tokens(body: Json) -> bool:
    options = body.get("stream_options") or {}
    return isinstance(options, dict) and bool(options.get("include_usage"))


def usage(replies: Sequence[TurnReply]) -> dict[str, int]:
    """Count the tokens of an answer; all of its choices share one context."""
    prompt, sampled = len(replies[0].context), sum(len(reply.tokens) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def completion(request: TurnRequest, name: str, kind: str, choices: Sequence[Json]) -> dict[str, Any]:
    """Return a completion, or a chunk of one."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model, "choices": list(choices)}


def answer(request: TurnRequest, replies: Sequence[TurnReply]) -> Json:
    choices = [
        {"index": index, "message": reply.message, "finish_reason": reply.reason} for index, reply in enumerate(replies)
    ]
    return {**completion(request, replies[0].name, "chat.completion", choices), "usage": usage(replies)}


class ChatEvents(TurnEvents):
    """Chunks of a chat completion, each with one choice."""

    def piece(self, index: int, text: str) -> Iterator[str]:
        yield self.chunk(index, {**({} if self.sent else {"role": "assistant"}), "content": text})
        self.sent += text

    def end(self, index: int, reply: TurnReply) -> Iterator[str]:
        text = reply.text[len(self.sent) :]
        if text or not self.sent:
            yield from self.piece(index, text)
        for number, call in enumerate(reply.message.get("tool_calls", [])):
            yield self.chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield self.chunk(index, {}, reply.reason)
        self.sent = ""

    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        if self.request.counts:
            chunk = completion(self.request, self.name, "chat.completion.chunk", [])
            yield event({**chunk, "usage": usage(replies)})
        yield DONE

    def chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        return event(completion(self.request, self.name, "chat.completion.chunk", [choice]))


def error(status: int, message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


CHAT = ChatDialect("/v1/chat/completions", read, answer, ChatEvents, error)

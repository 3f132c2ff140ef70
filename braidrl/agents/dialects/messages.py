"""Anthropic's messages: content in blocks of text, thinking, tool use and tool results.

A thinking block is the model's text between its tags of reasoning. Its signature names the tags, so that a client which
returns the block continues the row's tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from braidrl.agents.dialects.dialect import (
    BlockEvents,
    ChatDialect,
    Json,
    Reasoning,
    TurnReply,
    TurnRequest,
    call_of,
    event,
    function_of,
    joined,
    read_limit,
    read_model,
    read_objects,
    read_stops,
    refuse,
    split_reasoning,
)
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

UNSUPPORTED = ("container", "mcp_servers", "output_config", "output_format")
ROLES = ("user", "assistant", "system")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The type of an error by its HTTP status; `api_error` for others."""


def read(body: Json) -> TurnRequest:
    """Read a request. Raises UserError for unsupported fields, and for blocks that are not text, thinking or tools."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError("`messages` must be a list of {role, content}")
    refuse(body, UNSUPPORTED)
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") != "auto" or choice.get("disable_parallel_tool_use"):
        raise UserError('tool_choice must be {"type": "auto"}')
    tools = []
    for tool in read_objects(body, "tools"):
        if tool.get("type") not in (None, "custom"):
            raise UserError(f"a tool of the type {shown(tool['type'])} runs on a server, and is not served here")
        tools.append(function_of(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    system = [{"role": "system", "content": texts("system", body["system"])}] if body.get("system") else []
    return TurnRequest(
        [*system, *(m for message in messages for m in read_message(message))],
        tools,
        read_limit(body, "max_tokens"),
        read_stops(body, "stop_sequences"),
        bool(body.get("stream")),
        model=read_model(body),
    )


def texts(field: str, content: Any) -> str:
    """Return a text, or the joined texts of text blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise UserError(f"{field} is text, or a list of {{type: text, text}}, not {shown(block)}")
    return "".join(block["text"] for block in blocks)


def read_message(message: Any) -> list[ChatMessage]:
    """Return a message in OpenAI's form; several if it has tool results."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UserError(f"a message is an object with a role, {' or '.join(ROLES)}, not {shown(message)}")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise UserError(f"the content of a message is text, or a list of blocks, not {shown(content)}")
    return [read_turn(content)] if message["role"] == "assistant" else read_blocks(message["role"], content)


def read_turn(blocks: Sequence[Json]) -> ChatMessage:
    """Return the assistant's message, with the model's text as it was written."""
    text, calls = "", []
    for block in blocks:
        match block.get("type"):
            case "thinking" if isinstance(block.get("thinking"), str):
                text += joined(block["thinking"], block.get("signature"))
            case "tool_use" if isinstance(block.get("input", {}), dict):
                arguments = json.dumps(block.get("input", {}))
                calls.append(call_of(str(block.get("id")), str(block.get("name")), arguments))
            case _:
                text += texts("a block of an assistant's message", block)
    return (
        {"role": "assistant", "content": text or None, "tool_calls": calls}
        if calls
        else {"role": "assistant", "content": text}
    )


def read_blocks(role: str, blocks: Sequence[Json]) -> list[ChatMessage]:
    """Return a message for each result of a tool, and one for the texts around them."""
    messages: list[ChatMessage] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = texts("the content of a tool_result", block.get("content") or "")
            result = f"error: {result}" if block.get("is_error") else result
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += texts("a block of a message", block)
        else:
            messages.append({"role": role, "content": texts("a block of a message", block)})
    return messages


def blocks_of(reply: TurnReply) -> list[dict[str, Any]]:
    """Return the content of an answer."""
    parts, content = split_reasoning(reply.text, reply.opened), []
    if parts.thought is not None:
        content.append({"type": "thinking", "thinking": parts.thought, "signature": parts.signature})
    if parts.text:
        content.append({"type": "text", "text": parts.text})
    return [*content, *map(tool_use, reply.message.get("tool_calls", []))]


def tool_use(call: Json) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}


def ending(reply: TurnReply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stop and reply.reason == "stop" else REASONS[reply.reason]
    return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}


def message_of(request: TurnRequest, name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": request.model, **more}


def answer(request: TurnRequest, replies: Sequence[TurnReply]) -> Json:
    (reply,) = replies
    counts = {"input_tokens": len(reply.context), "output_tokens": len(reply.tokens)}
    return message_of(request, reply.name, content=blocks_of(reply), **ending(reply), usage=counts)


class MessageEvents(BlockEvents):
    """The events of a message: its blocks, each with its pieces, and the reason of its end."""

    keep_alive = event({"type": "ping"}, "ping")

    def begin(self) -> Iterator[str]:
        counts = {"input_tokens": self.context, "output_tokens": 0}
        empty = message_of(self.request, self.name, content=[], stop_reason=None, stop_sequence=None, usage=counts)
        yield self.named("message_start", message=empty)

    def start(self, kind: str) -> Iterator[str]:
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        block = thinking if kind == "thought" else {"type": "text", "text": ""}
        yield self.named("content_block_start", index=self.number, content_block=block)

    def delta(self, kind: str, text: str) -> Iterator[str]:
        if kind == "thought":
            yield self.changed(type="thinking_delta", thinking=text)
        else:
            yield self.changed(type="text_delta", text=text)

    def stop(self, kind: str, parts: Reasoning) -> Iterator[str]:
        if kind == "thought":
            yield self.changed(type="signature_delta", signature=parts.signature)
        yield self.named("content_block_stop", index=self.number)

    def call(self, call: Json) -> Iterator[str]:
        block = {**tool_use(call), "input": {}}
        yield self.named("content_block_start", index=self.number, content_block=block)
        yield self.changed(type="input_json_delta", partial_json=call["function"]["arguments"])
        yield self.named("content_block_stop", index=self.number)

    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        counts = {"input_tokens": len(replies[0].context), "output_tokens": len(replies[0].tokens)}
        yield self.named("message_delta", delta=ending(replies[0]), usage=counts)
        yield self.named("message_stop")

    def failed(self, message: str) -> Iterator[str]:
        yield event(error(503, message), "error")

    def changed(self, **delta: Any) -> str:
        return self.named("content_block_delta", index=self.number, delta=delta)

    def named(self, kind: str, **fields: Any) -> str:
        return event({"type": kind, **fields}, kind)


def error(status: int, message: str) -> Json:
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}


def counted(tokens: int) -> Mapping[str, int]:
    return {"input_tokens": tokens}


MESSAGES = ChatDialect("/v1/messages", read, answer, MessageEvents, error, counted)

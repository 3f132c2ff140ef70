"""OpenAI's responses: a conversation of items, each a message, a thought, a tool call, or its output.

The endpoint keeps no responses: `input` has the whole conversation. A reasoning item's `encrypted_content` names its
tags of reasoning.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from braidrl.agents.dialects.chat import error
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
    refuse,
    split_reasoning,
)
from braidrl.data.chat import ChatMessage
from braidrl.errors import UserError, shown

UNSUPPORTED = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs", "max_tool_calls")
USUAL = {"tool_choice": "auto", "truncation": "disabled"}
TEXTS = ("input_text", "output_text", "text")


def read(body: Json) -> TurnRequest:
    """Read a request. Raises UserError for unsupported fields, items and tools."""
    refuse(body, UNSUPPORTED, USUAL)
    refuse(body.get("text") or {}, (), {"format": {"type": "text"}})
    content = body.get("input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) and content else content
    if not isinstance(items, list) or not items:
        raise UserError("`input` must be a text or a list of items, and not empty")
    tools = []
    for tool in read_objects(body, "tools"):
        if tool.get("type") != "function":
            raise UserError(f"a tool of the type {shown(tool.get('type'))} is not served here; only functions are")
        tools.append(function_of(tool.get("name"), tool.get("description"), tool.get("parameters")))
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return TurnRequest(
        [*system, *read_items(items)],
        tools,
        read_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        model=read_model(body),
    )


def read_items(items: Sequence[Any]) -> list[ChatMessage]:
    """Return items as messages in OpenAI's form; a thought, a text and calls that follow each other are one message."""
    messages: list[ChatMessage] = []
    thinks = False  # the last message has only a thought
    for item in items:
        if not isinstance(item, dict):
            raise UserError(f"an item of `input` is an object, not {shown(item)}")
        is_turn = bool(messages) and messages[-1]["role"] == "assistant"
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            text = texts("the content of a message", item.get("content"))
            if item["role"] == "assistant" and thinks:
                messages[-1]["content"] += text
            else:
                messages.append({"role": item["role"], "content": text})
        elif kind == "reasoning":
            thought = "".join(part["text"] for part in item.get("content") or [])
            messages.append({"role": "assistant", "content": joined(thought, item.get("encrypted_content"))})
        elif kind == "function_call":
            if not is_turn:
                messages.append({"role": "assistant", "content": None})
            call = call_of(str(item.get("call_id")), str(item.get("name")), str(item.get("arguments") or "{}"))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = texts("the output of a function call", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise UserError(f"an item of the type {shown(kind)} is not served here")
        thinks = kind == "reasoning"
    return messages


def texts(field: str, content: Any) -> str:
    """Return a text, or the joined texts of parts."""
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            raise UserError(f"{field} is text, or a list of {{type: input_text, text}}, not {shown(part)}")
    return "".join(part["text"] for part in content)


def thought_item(name: str, parts: Reasoning) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": parts.thought}]
    signed = {"encrypted_content": parts.signature, "status": "completed"}
    return {"type": "reasoning", "id": name, "summary": [], "content": content, **signed}


def text_item(name: str, text: str, is_whole: bool = True) -> dict[str, Any]:
    content = [text_part(text)] if text else []
    status = "completed" if is_whole else "in_progress"
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(name: str, call: Json) -> dict[str, Any]:
    return {"type": "function_call", "id": name, "call_id": call["id"], "status": "completed", **call["function"]}


def items_of(reply: TurnReply) -> list[dict[str, Any]]:
    """Return the output of an answer; an item's id ends with its position."""
    parts, output = split_reasoning(reply.text, reply.opened), []
    if parts.thought is not None:
        output.append(thought_item(f"{reply.name}-0", parts))
    if parts.text or not (output or reply.message.get("tool_calls")):
        output.append(text_item(f"{reply.name}-{len(output)}", parts.text))
    for call in reply.message.get("tool_calls", []):
        output.append(call_item(f"{reply.name}-{len(output)}", call))
    return output


def response(request: TurnRequest, name: str, reply: TurnReply | None) -> dict[str, Any]:
    """Return a response, in progress if it has no reply."""
    is_cut = reply is not None and reply.reason == "length"
    return {
        "id": name,
        "object": "response",
        "created_at": time.time(),
        "status": "in_progress" if reply is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [] if reply is None else items_of(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "usage": None if reply is None else usage(len(reply.context), len(reply.tokens)),
    }


def usage(read_tokens: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": read_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read_tokens + sampled,
    }


def answer(request: TurnRequest, replies: Sequence[TurnReply]) -> Json:
    return response(request, replies[0].name, replies[0])


class ResponseEvents(BlockEvents):
    """The events of a response: each item with its pieces, numbered through."""

    def __init__(self, request: TurnRequest, name: str, context: int, opened: bool) -> None:
        super().__init__(request, name, context, opened)
        self._events = 0

    def begin(self) -> Iterator[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self.numbered(kind, response=response(self.request, self.name, None))

    def start(self, kind: str) -> Iterator[str]:
        if kind == "thought":
            empty = {"type": "reasoning", "id": self.item, "summary": [], "content": [], "status": "in_progress"}
            yield self.numbered("response.output_item.added", item=empty)
        else:
            yield self.numbered("response.output_item.added", item=text_item(self.item, "", is_whole=False))
            yield self.within("response.content_part.added", part=text_part(""))

    def delta(self, kind: str, text: str) -> Iterator[str]:
        if kind == "thought":
            yield self.within("response.reasoning_text.delta", delta=text)
        else:
            yield self.within("response.output_text.delta", delta=text, logprobs=[])

    def stop(self, kind: str, parts: Reasoning) -> Iterator[str]:
        if kind == "thought":
            yield self.within("response.reasoning_text.done", text=parts.thought)
            yield self.numbered("response.output_item.done", item=thought_item(self.item, parts))
        else:
            yield self.within("response.output_text.done", text=parts.text, logprobs=[])
            yield self.within("response.content_part.done", part=text_part(parts.text))
            yield self.numbered("response.output_item.done", item=text_item(self.item, parts.text))

    def call(self, call: Json) -> Iterator[str]:
        item, arguments = call_item(self.item, call), call["function"]["arguments"]
        started_item = {**item, "arguments": "", "status": "in_progress"}
        yield self.numbered("response.output_item.added", item=started_item)
        yield self.numbered("response.function_call_arguments.delta", item_id=self.item, delta=arguments)
        named = {"item_id": self.item, "name": item["name"], "arguments": arguments}
        yield self.numbered("response.function_call_arguments.done", **named)
        yield self.numbered("response.output_item.done", item=item)

    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        complete = response(self.request, self.name, replies[0])
        yield self.numbered(f"response.{complete['status']}", response=complete)

    def failed(self, message: str) -> Iterator[str]:
        yield self.numbered("error", message=message, code="server_error", param=None)

    @property
    def item(self) -> str:
        """The id of the current item."""
        return f"{self.name}-{self.number}"

    def within(self, kind: str, **fields: Any) -> str:
        return self.numbered(kind, item_id=self.item, content_index=0, **fields)

    def numbered(self, kind: str, **fields: Any) -> str:
        self._events += 1
        position = {} if "response" in fields or kind == "error" else {"output_index": self.number}
        return event({"type": kind, "sequence_number": self._events - 1, **position, **fields}, kind)


RESPONSES = ChatDialect("/v1/responses", read, answer, ResponseEvents, error)

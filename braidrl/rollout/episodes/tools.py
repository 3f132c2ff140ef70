"""Tools: functions that the model calls by writing `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do.

the model's turn ──parse──▶ calls, all at once ──▶ one `tool` message for each, in the order of the calls
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from braidrl.data.sources import Message
from braidrl.rollout.episodes.environments import called
from braidrl.rollout.episodes.turns import Context, Observation

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `fault` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    fault: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return every call in a turn, in order, malformed ones included."""
    return [parse_tool_call(match[1]) for match in CALL.finditer(text)]


def parse_tool_call(text: str) -> ToolCall:
    """Parse the text between one pair of tags."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError as error:
        return ToolCall(fault=f"the call is not JSON: {error.msg} at character {error.pos + 1}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(fault='a call is an object {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], fault="the arguments must be an object")
    return ToolCall(call["name"], arguments)


class ToolEnvironment(ABC):
    """A task with tools: a turn with calls is answered with their results; a turn without calls is the final answer."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Take functions with type hints and a docstring that describes them and each argument (under `Args:`)."""
        self._functions = {function.__name__: function for function in functions}
        self.tools: list[dict[str, Any]] = [get_json_schema(function) for function in functions]
        self.example: dict[str, Any] = {}

    async def reset(self, example: dict[str, Any]) -> Context | None:
        self.example = example
        return None

    async def step(self, text: str) -> Observation:
        calls = parse_tool_calls(text)
        if not calls:
            return self.answered(text)
        results = await asyncio.gather(*(self.result(call) for call in calls))
        messages: list[Message] = [{"role": "tool", "content": result} for result in results]
        return Observation(messages)

    @abstractmethod
    def answered(self, text: str) -> Observation:
        """Score the final answer; this ends the trajectory."""

    async def result(self, call: ToolCall) -> str:
        """Return the function's result, or why there is none, as text for the model."""
        if call.fault is None and call.name not in self._functions:
            return f"error: no tool is called {call.name!r}; there are {', '.join(self._functions)}"
        if call.fault is not None or call.arguments is None:
            return f"error: {call.fault}"
        try:
            found = await called(self._functions[call.name], **call.arguments)
        # what a tool raises is for the model to read, which may call it better next time
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found)

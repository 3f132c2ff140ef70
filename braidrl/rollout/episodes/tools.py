"""Tools: functions that the model calls by writing `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do.

the model's turn ──parse──▶ calls, all at once ──▶ one `tool` message for each, in the order of the calls
"""

from __future__ import annotations

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
from braidrl.rollout.episodes.observations import Observation
from braidrl.rollout.episodes.turns import Context

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `fault` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    fault: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Every call in a turn, in order, those that are not well-formed included."""
    return [parse_tool_call(match[1]) for match in CALL.finditer(text)]


def parse_tool_call(text: str) -> ToolCall:
    """The call between one pair of tags."""
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
    """A task with tools: turns with calls are answered with their results; a turn without any is the answer."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """`functions` have type hints, and a docstring that says what they and each of their arguments (under `Args:`) are for."""
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
        """What the turn without calls is worth; it ends the trajectory."""

    async def result(self, call: ToolCall) -> str:
        """What the model is told: the function's result, or why there is none."""
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

"""The base of environments with tools."""

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any

from braidrl.agents.tool_calls import CALL_ID, ToolCall, parse_tool_calls
from braidrl.agents.turns import Context, Observation


class ToolTurns(ABC):
    """A task with tools: a turn with calls is answered with their results; a turn without calls is the final answer.

    the model's turn ──parse──▶ calls, all at once ──▶ one `tool` message for each, in the order of the calls
    """

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        """Set the functions' JSON schemas, in the format of chat templates."""
        self.tools = list(tools)
        self._names = [tool["function"]["name"] for tool in tools]
        self.example: dict[str, Any] = {}

    async def reset(self, example: dict[str, Any]) -> Context | None:
        self.example = example
        return None

    async def step(self, text: str) -> Observation:
        calls = parse_tool_calls(text)
        if not calls:
            answer = self.answered(text)
            return await answer if inspect.isawaitable(answer) else answer
        results = await asyncio.gather(*(self.result(call) for call in calls))
        # Some chat templates need the name and an id.
        ids = map(CALL_ID.format, range(len(calls)))
        return Observation(
            [
                {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": result}
                for call, call_id, result in zip(calls, ids, results, strict=True)
            ]
        )

    @abstractmethod
    def answered(self, text: str) -> Observation | Awaitable[Observation]:
        """Score the final answer, which ends the trajectory."""

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call the tool `name` with `arguments`, and return its result, text or JSON. The model reads any exception."""

    async def result(self, call: ToolCall) -> str:
        """Return the function's result or its error, as text for the model."""
        if call.fault is None and call.name not in self._names:
            return f"error: no tool is called {call.name!r}; there are {', '.join(self._names)}"
        if call.fault is not None or call.arguments is None:
            return f"error: {call.fault}"
        try:
            value = await self.call(call.name, call.arguments)
        # The model reads a tool's exception, and may correct its next call.
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value)

"""Python functions as tools; their type hints and docstrings give the schemas."""

from collections.abc import Callable, Sequence
from typing import Any

# get_json_schema imports torch at its first call: imported here once, not again in the process of each trajectory.
import torch  # noqa: F401
from transformers.utils import get_json_schema

from braidrl.agents.environments import called
from braidrl.agents.tool_turns import ToolTurns


class ToolEnvironment(ToolTurns):
    """A task with tools that are Python functions."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Set the functions; each needs type hints and a docstring for it and each argument (under `Args:`)."""
        self._functions = {function.__name__: function for function in functions}
        super().__init__([get_json_schema(function) for function in functions])

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await called(self._functions[name], **arguments)

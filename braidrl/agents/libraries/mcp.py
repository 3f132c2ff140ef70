"""Tools of a Model Context Protocol server, by the official package `mcp`. A verifier scores the answer.

mcp:python server.py       a command, whose process serves one trajectory over its input and output
mcp:https://host/mcp       a running server, over HTTP

the model's call ──▶ session ──▶ server ──▶ the result as text ──▶ a `tool` message
"""

import asyncio
import inspect
import json
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from braidrl.agents.environments import ToolTurns
from braidrl.agents.turns import Observation
from braidrl.errors import UserError
from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rewards.verifiers import Score

ADDRESSES = ("http://", "https://")
SETTINGS = ("verify", "verify_params")


def environment(name: str, settings: Mapping[str, Any]) -> Callable[[], Awaitable["McpEnvironment"]]:
    """Return a factory that opens a session with a server. Raises UserError if the command or the verifier does not exist.

    `name` is a command, in which `python` is this interpreter, or an address; `settings` are `verify`, the verifier of the final
    answer (default `exact`), and `verify_params`, its settings.
    """
    verifier = resolve(settings.get("verify", "exact"), settings.get("verify_params"))
    if name.startswith(ADDRESSES):
        return partial(opened, name, verifier)
    words = shlex.split(name)
    if not words:
        raise UserError("mcp: names no server; write mcp:COMMAND, such as `mcp:python server.py`, or mcp:ADDRESS")
    if words[0] == "python":
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise UserError(f"environment mcp:{name}: there is no command {words[0]!r}; install it, or write an address")
    return partial(opened, words, verifier)


async def opened(server: str | list[str], verifier: Verifier) -> "McpEnvironment":
    """Return an environment with the tools of a server. Raises what the connection raises."""
    from mcp import Client, StdioServerParameters

    connection: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    reached: Any = server
    if not isinstance(server, str):
        reached = StdioServerParameters(command=server[0], args=server[1:], env=dict(os.environ))

    async def hold() -> None:
        """Open and close the connection in one task, as the package requires."""
        async with Client(reached) as client:
            connection.set_result(client)
            await over.wait()

    task = asyncio.create_task(hold())
    try:
        await asyncio.wait((connection, task), return_when=asyncio.FIRST_COMPLETED)
        if not connection.done():
            await task
        tools = (await connection.result().list_tools()).tools
    except BaseException:  # also if the time limit has passed: a command's process would run on
        task.cancel()
        await asyncio.wait((task,))
        raise
    functions = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]
    schemas = [{"type": "function", "function": each} for each in functions]
    return McpEnvironment(connection.result(), schemas, verifier, over, task)


class McpEnvironment(ToolTurns):
    """A question, the tools of a server, and a verifier."""

    def __init__(
        self, client: Any, tools: list[dict[str, Any]], verifier: Verifier, over: asyncio.Event, task: asyncio.Task[None]
    ) -> None:  # fmt: skip
        """Take a connected client; its `task` closes the connection once `over` is set."""
        super().__init__(tools)
        self._client, self._verifier, self._over, self._task = client, verifier, over, task

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._client.call_tool(name, arguments)
        parts = [part.text if hasattr(part, "text") else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or json.dumps(result.structured_content)
        return f"error: {text}" if result.is_error else text

    async def answered(self, text: str) -> Observation:
        own = {name: self.example.get(name) for name in ("prompt", "answer")}
        source = str(self.example.get("source", ""))
        found = self._verifier({**own, "source": source, "response": text, "metadata": self.example})
        found = await found if inspect.isawaitable(found) else found
        score = found if isinstance(found, Score) else Score(float(found))
        return Observation(done=True, reward=score.score, correct=score.correct)

    async def close(self) -> None:
        self._over.set()
        await self._task

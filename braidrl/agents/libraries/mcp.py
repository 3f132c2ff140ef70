"""Tools of a Model Context Protocol server, by the official package `mcp`. A verifier scores the answer.

mcp:python server.py       a command, whose process serves one trajectory over its input and output
mcp:https://host/mcp       a running server, over HTTP

the model's call ──▶ session ──▶ server ──▶ the result as text ──▶ a `tool` message
"""

import asyncio
import importlib.util
import inspect
import json
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from braidrl.agents.tool_turns import ToolTurns
from braidrl.agents.turns import Observation
from braidrl.errors import UserError, suggest
from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rewards.verifiers import Score

ADDRESSES = ("http://", "https://")
SETTINGS = ("verify", "verify_params")


def environment(name: str, settings: Mapping[str, Any]) -> Callable[[], Awaitable["McpEnvironment"]]:
    """Return a factory that opens a session with a server.

    Args:
        name: A command or an address.
        settings: `verify`, the verifier of the final answer (default `exact`), and `verify_params`, its settings.

    Raises:
        UserError: The package, the command or the verifier does not exist.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UserError(f"environment mcp:{name} needs mcp; install it with `pip install 'braidrl[mcp]'`")
    for key in settings:
        if key not in SETTINGS:
            raise UserError(f"rollout.environment.params: mcp: has no setting {key!r}. {suggest(key, SETTINGS)}")
    verifier = resolve(settings.get("verify", "exact"), settings.get("verify_params"))
    return partial(opened, server_of(name), verifier)


def server_of(name: str) -> str | list[str]:
    """Return an address, or the words of a command; `python` is this interpreter. Raises UserError for a command that does not exist."""
    if name.startswith(ADDRESSES):
        return name
    words = shlex.split(name)
    if not words:
        raise UserError("mcp: names no server; write mcp:COMMAND, such as `mcp:python server.py`, or mcp:ADDRESS")
    if words[0] == "python":
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise UserError(f"environment mcp:{name}: there is no command {words[0]!r}; install it, or write an address")
    return words


async def opened(server: str | list[str], verifier: Verifier) -> "McpEnvironment":
    """Return an environment with the tools of a server. Raises what the connection raises."""
    session = McpSession(server)
    client = await session.open()
    try:
        listed = await client.list_tools()
    except BaseException:
        await session.close()
        raise
    functions = (
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in listed.tools
    )
    return McpEnvironment(session, client, [{"type": "function", "function": each} for each in functions], verifier)


class McpSession:
    """A connection to a server, which one task opens and closes, as the package requires."""

    def __init__(self, server: str | list[str]) -> None:
        self.server = server
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Any:
        """Return the client. Raises what the connection raises."""
        client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(client))
        await asyncio.wait((client, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not client.done():
            await self._task
        return client.result()

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        from mcp import Client, StdioServerParameters

        server: Any = self.server
        if not isinstance(server, str):
            server = StdioServerParameters(command=server[0], args=server[1:], env=dict(os.environ))
        async with Client(server) as client:
            opened.set_result(client)
            await self._over.wait()

    async def close(self) -> None:
        """End the session, and a command's process."""
        self._over.set()
        if self._task is not None:
            await self._task


class McpEnvironment(ToolTurns):
    """A question, the tools of a server, and a verifier."""

    def __init__(self, session: McpSession, client: Any, tools: list[dict[str, Any]], verifier: Verifier) -> None:
        super().__init__(tools)
        self._session, self._client, self._verifier = session, client, verifier

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._client.call_tool(name, arguments)
        parts = [part.text if hasattr(part, "text") else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or json.dumps(result.structured_content)
        return f"error: {text}" if result.is_error else text

    async def answered(self, text: str) -> Observation:
        example = self.example
        completion = {
            "prompt": example.get("prompt"),
            "answer": example.get("answer"),
            "source": str(example.get("source", "")),
        }
        found = self._verifier({**completion, "response": text, "metadata": example})
        found = await found if inspect.isawaitable(found) else found
        score = found if isinstance(found, Score) else Score(float(found))
        return Observation(done=True, reward=score.score, correct=score.correct)

    async def close(self) -> None:
        await self._session.close()

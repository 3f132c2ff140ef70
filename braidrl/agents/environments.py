"""The protocol of environments, in which a model acts turn by turn, and their lookup by name.

    reset(example) ──▶ context ──▶ the model's text ──step──▶ Observation ──▶ the model's text ──step──▶ ... done

`module:Class`      a class with `reset` and `step`; one object plays one trajectory
`module:function`   called with all texts of the trajectory so far and the example; returns an Observation
`gem:name`          an environment of gem-llm
`mcp:server`        the tools of an MCP server, a command or an address
`openenv:address`   an environment of an OpenEnv server

`agent:module:function` is a whole agent, not an environment; see `agents`. So is `verifiers:name`, an environment with its own loop.
"""

import asyncio
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from braidrl.agents.turns import Context, Observation
from braidrl.errors import UserError
from braidrl.importing import PluginRegistry, import_function

__all__ = ["Context", "Environment", "FunctionEnvironment", "MakeEnvironment", "Observation", "environments"]


class Environment(Protocol):
    """One trajectory's environment. Methods are coroutines, or plain functions, which run in a thread of their own.

    It may also have `tools`, JSON schemas for the chat template, and `close()`, called when the trajectory ends.
    """

    def reset(self, example: dict[str, Any]) -> Awaitable[Context | None] | Context | None:
        """Return the first context, or None to use the example's own prompt.

        `example` holds the fields of the data file, `prompt`, `answer`, `group`, `sample`, and `seed`, the same for a group.
        """

    def step(self, text: str) -> Awaitable[Observation] | Observation:
        """Return the observation after the model's turn."""


ENVIRONMENTS = PluginRegistry("environment", {})
"""A user's class, or function of all texts so far; names with a scheme are looked up in `LIBRARIES`."""
LIBRARIES = {name: f"braidrl.agents.libraries.{name}" for name in ("gem", "mcp", "openenv")}
"""The module of each scheme."""
MakeEnvironment = Callable[[], Environment | Awaitable[Environment]]
AGENT, VERIFIERS = "agent:", "verifiers:"
VERIFIERS_LIBRARY = "braidrl.agents.libraries.verifiers_library"


class FunctionEnvironment:
    """A plain function as an environment without state: it sees every turn of the trajectory, and the example."""

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        """Begin without a trajectory.

        Args:
            function: Takes the texts of all turns and the example, returns an Observation; may be a coroutine function.
            settings: Further arguments of the function.
        """
        self._function, self._settings = function, dict(settings)
        self._example: dict[str, Any] = {}
        self._texts: list[str] = []

    async def reset(self, example: dict[str, Any]) -> None:
        self._example, self._texts = example, []

    async def step(self, text: str) -> Observation:
        self._texts.append(text)
        return await called(self._function, list(self._texts), self._example, **self._settings)


def environments(name: str, settings: Mapping[str, Any]) -> MakeEnvironment:
    """Return a factory of environments, one for each trajectory.

    Args:
        name: `module:Class`, `module:function`, or a library's, such as `gem:name`.
        settings: Its arguments.

    Raises:
        UserError: There is no environment of this name.
    """
    scheme, _, rest = name.partition(":")
    if scheme in LIBRARIES:
        return importlib.import_module(LIBRARIES[scheme]).environment(rest, settings)
    found: Any = ENVIRONMENTS.find(name)
    if not isinstance(found, type):
        return partial(FunctionEnvironment, found, settings)
    lacking = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if lacking:
        raise UserError(f"{name} is no environment: it lacks {' and '.join(lacking)}")
    return partial(found, **settings)


def is_agent(name: str) -> bool:
    """Return whether a name is an agent's, which plays against an endpoint."""
    return name.startswith((AGENT, VERIFIERS))


def agent_of(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return an agent, a function of the endpoint's address and the example. Raises UserError if there is none of this name."""
    if name.startswith(VERIFIERS):
        return importlib.import_module(VERIFIERS_LIBRARY).agent(name.removeprefix(VERIFIERS), settings)
    return partial(import_function(name.removeprefix(AGENT)), **settings)


def check_environment(name: str, settings: Mapping[str, Any], python: Path | None = None) -> None:
    """Raise UserError for a name that is neither an environment nor an agent. With `python` that interpreter looks the name up later."""
    if is_agent(name) and importlib.util.find_spec("aiohttp") is None:
        raise UserError(f"{name} needs aiohttp for its endpoint; install it with `pip install 'braidrl[endpoint]'`")
    if python is not None:
        return
    if name.startswith(VERIFIERS):
        importlib.import_module(VERIFIERS_LIBRARY).check_verifiers(name.removeprefix(VERIFIERS))
    elif name.startswith(AGENT):
        agent_of(name, settings)
    else:
        environments(name, settings)


async def called(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a coroutine function, or a plain function in a thread of its own so that it does not block the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **settings)
    return await in_thread(partial(function, *arguments, **settings))


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run the function in a daemon thread and return its result. After a cancellation the thread continues, and does not delay exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return await answer

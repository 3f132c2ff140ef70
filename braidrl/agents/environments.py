"""The protocol of environments, in which a model acts turn by turn, their lookup by name, and their base with tools.

    reset(example) ──▶ context ──▶ the model's text ──step──▶ Observation ──▶ the model's text ──step──▶ ... done

`module:Class`      a class with `reset` and `step`; one object plays one trajectory
`module:function`   called with all texts of the trajectory so far and the example; returns an Observation
`gem:name`          an environment of gem-llm
`mcp:server`        the tools of an MCP server, a command or an address
`openenv:address`   an environment of an OpenEnv server

`agent:module:function` is a whole agent, not an environment; see `player`. So is `verifiers:name`, an environment with
its own loop.

In a process of the sandbox, an environment or agent answers requests:

-> {"load": null}        <- {}
-> {"make": null}        <- {"tools", "closes"}         -> {"step": text}             <- an observation
-> {"reset": example}    <- {"context"}                 -> {"close": null}            <- {}
-> {"act": [url, example]}     <- an observation        any                           <- {"failure", "detail"}
"""

import asyncio
import concurrent.futures
import importlib.util
import inspect
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from braidrl.agents.tool_calls import CALL_ID, ToolCall, parse_tool_calls
from braidrl.agents.turns import Context, Observation, outcome_of
from braidrl.errors import UserError
from braidrl.importing import PluginRegistry, check_call, check_settings, import_function
from braidrl.sandbox.answers import Answerer, Answering, Message

__all__ = ["Context", "Environment", "Observation", "ToolTurns", "environments"]


class Environment(Protocol):
    """One trajectory's environment. Methods are coroutines, or plain functions, which run in a thread of their own.

    It may also have `tools`, JSON schemas for the chat template, and `close()`, called when the trajectory ends.
    """

    def reset(self, example: dict[str, Any]) -> Awaitable[Context | None] | Context | None:
        """Return the first context, or None to use the example's own prompt.

        `example` holds the fields of the data file, `prompt`, `answer`, `group`, `sample`, and `seed`, the same for a
        group.
        """

    def step(self, text: str) -> Awaitable[Observation] | Observation:
        """Return the observation after the model's turn."""


ENVIRONMENTS = PluginRegistry("environment", {}, methods=("reset", "step"))
"""A user's class, or function of all texts so far; names with a scheme are looked up in `LIBRARIES`."""
COLLIDES = ", where versions collide into an environment of its own, whose interpreter is rollout.environment.python"
LIBRARIES = {
    "gem": ("gem-llm", "`pip install 'braidrl[gem]'`"),
    "mcp": ("mcp", "`pip install 'braidrl[mcp]'`"),
    "openenv": ("openenv", f"`pip install openenv`{COLLIDES}"),
    "verifiers": ("verifiers", f"`pip install 'verifiers>=0.1.14,<0.4'`{COLLIDES}"),
}
"""The package that each scheme needs; `libraries` has a function for each."""
AGENTS = AGENT, VERIFIERS = ("agent:", "verifiers:")
"""The beginnings of agents' names, which play against an endpoint."""


@dataclass
class FunctionEnvironment:
    """A function of the texts of all turns, the example and its settings, as an environment without state of its
    own.
    """

    function: Callable[..., Any]
    settings: Mapping[str, Any]

    async def reset(self, example: dict[str, Any]) -> None:
        self.example, self.texts = example, list[str]()

    async def step(self, text: str) -> Observation:
        self.texts.append(text)
        return await called(self.function, list(self.texts), self.example, **self.settings)


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
                {"role": "tool", "name": call.name, "tool_call_id": own, "content": result}
                for call, own, result in zip(calls, ids, results, strict=True)
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
            found = await self.call(call.name, call.arguments)
        # The model reads a tool's exception, and may correct its next call.
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found)


def environments(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a factory of environments, one for each trajectory, or for an agent's name the agent: a function of the
    endpoint's address and the example.

    `name` is `module:Class`, `module:function`, or a library's, such as `gem:name`; `settings` are its arguments.
    Raises UserError if there is none of this name.
    """
    scheme, _, rest = name.partition(":")
    if name.startswith(AGENT):
        agent = import_function(rest)
        check_call(f"rollout.environment: {name}", agent, "base_url", "example", settings=settings)
        return partial(agent, **settings)
    if scheme in LIBRARIES:
        check_library(name)
        # Here, and by name: it imports this module.
        make = getattr(importlib.import_module("braidrl.agents.libraries"), scheme)
        check_settings(f"rollout.environment.params: {scheme}:", make, settings)
        return make(rest, **settings)
    found: Any = ENVIRONMENTS.find(name)
    if not isinstance(found, type):
        check_call(f"rollout.environment: {name}", found, "texts", "example", settings=settings)
        return partial(FunctionEnvironment, found, settings)
    ENVIRONMENTS.check_methods(name, found)
    check_call(f"rollout.environment: {name}", found, settings=settings)
    for method, given in (("reset", "example"), ("step", "text")):
        if inspect.isfunction(inspect.getattr_static(found, method)):
            check_call(f"rollout.environment: {name}: {method}", getattr(found, method), "self", given)
    return partial(found, **settings)


def check_library(name: str) -> None:
    """Raise UserError if the library of an environment, such as `gem:name`, is not installed."""
    scheme = name.partition(":")[0]
    package, install = LIBRARIES[scheme]
    if importlib.util.find_spec(scheme) is None:
        raise UserError(f"environment {name} needs {package}; install it with {install}")


def check_environment(name: str, settings: Mapping[str, Any], python: Path | None = None) -> None:
    """Raise UserError for a name that is neither an environment nor an agent.

    With `python` that interpreter looks the name up later.
    """
    if name.startswith(AGENTS) and importlib.util.find_spec("aiohttp") is None:
        raise UserError(f"{name} needs aiohttp for its endpoint; install it with `pip install 'braidrl[endpoint]'`")
    if python is None and name.startswith(VERIFIERS):
        check_library(name)  # its environment may take long to load
    elif python is None:
        environments(name, settings)


def answerer(name: str, params: dict[str, Any]) -> Answerer:
    """Return the answerer for one trajectory of an environment or agent, which the first request imports."""
    loaded: Callable[..., Any]
    environment: Any = None

    def answer(method: str, argument: Any) -> Message | Answering:
        nonlocal loaded
        if method == "load":
            loaded = environments(name, params)
            return {}
        return played(method, argument)

    async def played(method: str, argument: Any) -> Message:
        nonlocal environment
        call = loaded if method in ("act", "make") else getattr(environment, method)
        found = call(*(argument if method == "act" else () if method in ("make", "close") else (argument,)))
        found = await found if inspect.isawaitable(found) else found
        if method == "make":
            environment = found
            return {"tools": list(getattr(found, "tools", ())), "closes": hasattr(found, "close")}
        if method in ("reset", "close"):
            return {"context": found} if method == "reset" else {}
        seen = outcome_of(found) if method == "act" else found
        if not isinstance(seen, Observation):
            raise TypeError(f"`step` returned {seen!r}, which is no Observation")
        return {
            "said": seen.said,
            "reward": float(seen.reward),
            "done": bool(seen.done),
            "restart": bool(seen.restart),
            "correct": None if seen.correct is None else bool(seen.correct),
        }

    return answer


async def called(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a coroutine function, or a plain function in a thread of its own so that it does not block the event
    loop.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **settings)
    return await in_thread(partial(function, *arguments, **settings))


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run the function in a daemon thread and return its result.

    After a cancellation the thread continues, and does not delay exit.
    """
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def work() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return await asyncio.wrap_future(answer)

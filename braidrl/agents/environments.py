"""The protocol of environments, in which a model acts turn by turn, their lookup by name, and their base with tools.

    reset(example) ──▶ context ──▶ the model's text ──step──▶ Observation ──▶ the model's text ──step──▶ ... done

`module:Class`      a class with `reset` and `step`; one object plays one trajectory
`module:function`   called with all texts of the trajectory so far and the example; returns an Observation
`gem:name`          an environment of gem-llm
`mcp:server`        the tools of an MCP server, a command or an address
`openenv:address`   an environment of an OpenEnv server
`textarena:name`    a game of textarena, of one player or of several roles

`agent:module:function` is a whole agent, not an environment; see `player`. So are `verifiers:name` and `harbor:folder`,
environments with their own loop.

In a process of the sandbox, an environment or agent answers requests:

-> {"load": null}        <- {}
-> {"make": null}        <- {"tools", "closes"}         -> {"step": text}             <- an observation
-> {"reset": example}    <- {"context"}, or an observation
-> {"close": null}       <- {}
-> {"act": [url, example]}     <- an observation        any                           <- {"failure", "detail"}
"""

import asyncio
import concurrent.futures
import importlib.util
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from braidrl.agents.libraries import LIBRARIES
from braidrl.agents.tool_turns import ToolTurns
from braidrl.agents.turns import Context, EnvironmentFailed, Observation, outcome_of
from braidrl.errors import UserError
from braidrl.importing import PluginRegistry, check_call, check_settings, import_function
from braidrl.sandbox.answers import Answerer, Answering, Message

__all__ = ["Context", "Environment", "Observation", "ToolTurns", "environments"]


class Environment(Protocol):
    """One trajectory's environment.

    Methods are coroutines, or plain functions, which run in a separate thread. It may also have `tools`, JSON schemas
    for the chat template, and `close()`, called when the trajectory ends.
    """

    def reset(self, example: dict[str, Any]) -> Awaitable[Context | Observation | None] | Context | Observation | None:
        """Return the first context, None to use the example's prompt, or an observation that names with `policy` the
        role that begins.

        `example` holds the fields of the data file, `prompt`, `answer`, `group`, `sample`, and `seed`, the same for a
        group.
        """

    def step(self, text: str) -> Awaitable[Observation] | Observation:
        """Return the observation after the model's turn."""


ENVIRONMENTS = PluginRegistry("environment", {}, methods=("reset", "step"))
"""A user's class, or function of all texts so far; names with a scheme are looked up in `LIBRARIES`."""
AGENT = "agent:"
AGENTS = (AGENT, *(f"{scheme}:" for scheme, library in LIBRARIES.items() if library.is_agent))
"""The beginnings of agents' names, which play against an endpoint."""


@dataclass
class FunctionEnvironment:
    """A function of the texts of all turns, the example and its settings, as a stateless environment."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]

    async def reset(self, example: dict[str, Any]) -> None:
        self.example, self.texts = example, list[str]()

    async def step(self, text: str) -> Observation:
        self.texts.append(text)
        return await called(self.function, list(self.texts), self.example, **self.settings)


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
        LIBRARIES[scheme].check(name)
        check_settings(f"rollout.environment.params: {scheme}:", LIBRARIES[scheme].find, settings)
        return LIBRARIES[scheme].find(rest, **settings)
    environment: Any = ENVIRONMENTS.find(name)
    if not isinstance(environment, type):
        check_call(f"rollout.environment: {name}", environment, "texts", "example", settings=settings)
        return partial(FunctionEnvironment, environment, settings)
    ENVIRONMENTS.check_methods(name, environment)
    check_call(f"rollout.environment: {name}", environment, settings=settings)
    for method, argument in (("reset", "example"), ("step", "text")):
        if inspect.isfunction(inspect.getattr_static(environment, method)):
            check_call(f"rollout.environment: {name}: {method}", getattr(environment, method), "self", argument)
    return partial(environment, **settings)


def check_environment(name: str, settings: Mapping[str, Any], python: Path | None = None) -> None:
    """Raise UserError for a name that is neither an environment nor an agent.

    With `python` that interpreter looks the name up later.
    """
    if name.startswith(AGENTS) and importlib.util.find_spec("aiohttp") is None:
        raise UserError(f"{name} needs aiohttp for its endpoint; install it with `pip install 'braidrl[endpoint]'`")
    library = LIBRARIES.get(name.partition(":")[0])
    if python is None and library is not None and library.is_agent:
        library.check(name)  # its environment may take long to load
    elif python is None:
        environments(name, settings)


def answerer(name: str, params: dict[str, Any]) -> Answerer:
    """Return the answerer of one trajectory; its first request imports the environment or agent."""
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
        result = call(*(argument if method == "act" else () if method in ("make", "close") else (argument,)))
        result = await result if inspect.isawaitable(result) else result
        if method == "make":
            environment = result
            return {"tools": list(getattr(result, "tools", ())), "closes": hasattr(result, "close")}
        if method == "close" or (method == "reset" and not isinstance(result, Observation)):
            return {"context": result} if method == "reset" else {}
        try:
            observation = outcome_of(result) if method == "act" else result
        except EnvironmentFailed as failed:
            return {"failure": failed.reason, "detail": failed.detail}
        if not isinstance(observation, Observation):
            raise TypeError(f"`step` returned {observation!r}, which is no Observation")
        return {
            "said": observation.said,
            "reward": float(observation.reward),
            "done": bool(observation.done),
            "restart": bool(observation.restart),
            "correct": None if observation.correct is None else bool(observation.correct),
            "policy": observation.policy,
            "rewards": {role: float(reward) for role, reward in observation.rewards.items()},
        }

    return answer


async def called(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a coroutine function, or a plain function in a separate thread so that it does not block the event loop."""
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

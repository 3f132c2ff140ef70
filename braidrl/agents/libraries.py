"""Environments of other libraries: games of gem-llm and textarena, tools of an MCP server, environments of an OpenEnv
server, and those of `verifiers` and tasks of `harbor`, which run their own loop.

Each library is a value of `LIBRARIES`. `environments` looks a name's scheme up there, and calls its `find` with the
rest of the name and the settings, if the library is installed. `find` imports the library: the processes of
trajectories are copies of the one that called it, and would otherwise import it within their time limit.
"""

import asyncio
import base64
import copy
import importlib
import importlib.util
import inspect
import json
import logging
import os
import random
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from braidrl.agents.tool_turns import ToolTurns
from braidrl.agents.turns import Context, Observation
from braidrl.errors import UserError, suggest
from braidrl.importing import source_of
from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rewards.verifiers import Score

HTTP, WEBSOCKET = ("http://", "https://"), ("ws://", "wss://")
NOT_SAID = ("metadata",)
"""Fields of an OpenEnv observation that are not for the model."""
CONTAINER = tuple(map(Path, ("/app", "/logs", "/solution", "/tests")))
"""Folders of a container that harbor and its tasks use."""
RANDOM_LOCK = threading.Lock()


class OwnRandomNumbers:
    """The random state of one environment whose library uses that of the process."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use this state for the process's random numbers."""
        import numpy as np

        with RANDOM_LOCK:
            outside = (random.getstate(), np.random.get_state())
            if self._state is not None:
                random.setstate(self._state[0])
                np.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = (random.getstate(), np.random.get_state())
                random.setstate(outside[0])
                np.random.set_state(outside[1])


def gem(name: str, /, **settings: Any) -> Callable[[], "GemEnvironment"]:
    """Return a factory of `gem:name`, such as `gem:game:GuessTheNumber-v0-easy`.

    Raises UserError if gem has no such environment, or a package that it needs is missing.
    """
    load_gem()
    registry = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    if name not in registry:
        raise UserError(f"gem has no environment {name!r}. {suggest(name, registry)}")
    made_by = registry[name].entry_point
    if isinstance(made_by, str):
        try:
            importlib.import_module(made_by.partition(":")[0])
        except ImportError as error:
            raise UserError(f"environment gem:{name} needs a package that is missing: {error}") from error
    return partial(GemEnvironment, name, settings)


@dataclass
class GemEnvironment:
    """A gem environment with its own random state, independent of others in the process."""

    name: str
    settings: Mapping[str, Any]
    _random: OwnRandomNumbers = field(default_factory=OwnRandomNumbers)
    _environment: Any = None

    def reset(self, example: dict[str, Any]) -> Observation:
        """Start with the example's seed, and return the instructions."""
        with self._random.used():
            self._environment = load_gem().make(self.name, **self.settings)
            instructions, info = self._environment.reset(seed=example["seed"])
        return Observation(context_of(instructions, info))

    def step(self, text: str) -> Observation:
        with self._random.used():
            observed, reward, terminated, truncated, info = self._environment.step(text)
        return Observation(context_of(observed, info), float(reward), bool(terminated or truncated))


def context_of(observed: str | Mapping[str, Any], info: Mapping[str, Any]) -> Context:
    """Return an observation of gem as text, or a problem with images as a user's message.

    gem's request for the next action is separate from its observation. Raises BrokenImage for an image that cannot be
    read, or another number of marks.
    """
    problem, images = (observed["problem"], observed["images"]) if isinstance(observed, Mapping) else (observed, ())
    text = "\n".join(filter(None, (problem, info.get("suffix"))))
    if not images:
        return text
    from braidrl.data.images import content_of, with_images

    contents = [content_of(image, Path())[0] for image in images]
    addresses = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in contents]
    return with_images([{"role": "user", "content": text}], addresses)


def load_gem() -> ModuleType:
    """Import gem with its environments registered, and restore the process's logging afterwards."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    try:
        importlib.import_module("gem.envs")
        return importlib.import_module("gem")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


def textarena(name: str, /, *, policies: Sequence[str] = (), **settings: Any) -> Callable[[], "TextArenaGame"]:
    """Return a factory of games of `textarena:name`, such as `textarena:GuessTheNumber-v0`.

    `policies` are the roles that play against each other; without them the game has one player. `settings` are those
    of the game. Raises UserError if there is no such game, or it cannot be made.
    """
    games = importlib.import_module("textarena")
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if name not in registry:
        raise UserError(f"textarena has no game {name!r}. {suggest(name, registry)}")
    try:
        game = games.make(name, **settings)
        TextArenaGame(copy.deepcopy(game), policies).reset({"seed": 0})
    except Exception as error:
        reason = " ".join(re.sub(r"\x1b\[\d+m|\*", "", str(error)).split())[:200]
        raise UserError(f"environment textarena:{name} cannot be made: {type(error).__name__}: {reason}") from error
    return lambda: TextArenaGame(copy.deepcopy(game), policies)


class TextArenaGame:
    """A game of textarena with its own random state.

    A player reads what the game and the other players have said since its last turn, without its own words. The group's
    seed chooses which of the roles is which player.
    """

    def __init__(self, game: Any, policies: Sequence[str] = ()) -> None:
        self._game, self._random, self._policies = game, OwnRandomNumbers(), list(policies)
        self._messages, wrapper = game, importlib.import_module("textarena").Wrapper
        while isinstance(self._messages, wrapper):  # these repeat the game's whole history
            self._messages = self._messages.env

    def reset(self, example: dict[str, Any]) -> Observation:
        """Start with the example's seed, and return what the first player reads."""
        with self._random.used():
            random.seed(example["seed"])
            random.shuffle(self._policies)
            self._game.reset(num_players=max(1, len(self._policies)), seed=example["seed"])
            return self._turn()

    def step(self, text: str) -> Observation:
        with self._random.used():
            player = self._messages.state.current_player_id
            done, _ = self._game.step(text)
            if not done:
                return self._turn()
            rewards = {number: float(reward) for number, reward in (self._game.close()[0] or {}).items()}
        others = {role: rewards.get(n, 0.0) for n, role in enumerate(self._policies) if n != player}
        return Observation(reward=rewards.get(player, 0.0), done=True, rewards=others)

    def _turn(self) -> Observation:
        """Return what the next player reads."""
        player, messages = self._messages.get_observation()
        names = self._messages.state.role_mapping
        said = [f"[{names.get(by, f'Player {by}')}] {text}" for by, text, *_ in messages if by != player]
        return Observation("\n".join(said), policy=self._policies[player] if self._policies else None)


def mcp(
    name: str, /, *, verify: str = "exact", verify_params: Mapping[str, Any] | None = None
) -> Callable[[], Awaitable["McpEnvironment"]]:
    """Return a factory that opens a session with a server. Raises UserError if the command or the verifier does not
    exist.

    mcp:python server.py       a command, whose process serves one trajectory over its input and output; `python` is
                               this interpreter
    mcp:https://host/mcp       a running server, over HTTP

    The verifier `verify`, with the settings `verify_params`, scores the final answer.
    """
    importlib.import_module("mcp")
    # It logs each invalid answer with a traceback in addition to raising.
    logging.getLogger("mcp.client").setLevel(logging.CRITICAL)
    verifier, server = resolve(verify, verify_params), [name]
    if not name.startswith(HTTP):
        server = shlex.split(name)
        if not server:
            raise UserError("mcp: names no server; write mcp:COMMAND, such as `mcp:python server.py`, or mcp:ADDRESS")
        if server[0] == "python":
            server[0] = sys.executable
        if shutil.which(server[0]) is None:
            raise UserError(
                f"environment mcp:{name}: there is no command {server[0]!r}; install it, or write an address"
            )
    return partial(McpEnvironment.opened, server, verifier)


class McpEnvironment(ToolTurns):
    """A question, the tools of a server, and a verifier.

    the model's call ──▶ session ──▶ server ──▶ the result as text ──▶ a `tool` message
    """

    def __init__(
        self,
        client: Any,
        tools: list[dict[str, Any]],
        verifier: Verifier,
        over: asyncio.Event,
        task: asyncio.Task[None],
    ) -> None:
        """Take a connected client; its `task` closes the connection once `over` is set."""
        super().__init__(tools)
        self._client, self._verifier, self._over, self._task = client, verifier, over, task

    @staticmethod
    async def opened(server: list[str], verifier: Verifier) -> "McpEnvironment":
        """Connect to a server, an address or the words of a command. Raises the connection's errors."""
        from mcp import Client, StdioServerParameters

        connection: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()
        reached: Any = server[0]
        if not reached.startswith(HTTP):
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
        except BaseException:  # even after the time limit: a command's process would otherwise keep running
            task.cancel()
            await asyncio.wait((task,))
            raise
        functions = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]
        schemas = [{"type": "function", "function": function} for function in functions]
        return McpEnvironment(connection.result(), schemas, verifier, over, task)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._client.call_tool(name, arguments)
        parts = [part.text if hasattr(part, "text") else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or json.dumps(result.structured_content)
        return f"error: {text}" if result.is_error else text

    async def answered(self, text: str) -> Observation:
        fields = {name: self.example.get(name) for name in ("prompt", "answer")}
        source = str(self.example.get("source", ""))
        result = self._verifier({**fields, "source": source, "response": text, "metadata": self.example})
        result = await result if inspect.isawaitable(result) else result
        score = result if isinstance(result, Score) else Score(float(result))
        return Observation(done=True, reward=score.score, correct=score.correct)

    async def close(self) -> None:
        self._over.set()
        await self._task


def openenv(
    name: str, /, *, action: str | None = None, observation: str | None = None
) -> Callable[[], "OpenEnvEnvironment"]:
    """Return a factory that opens a session with a server, `openenv:http://host:8000`. Raises UserError for a name that
    is no address.

    the model's text ──▶ {"message": text} or the action that it wrote as JSON ──▶ server ──▶ observation, as text

    `action` is the field of an action for the model's text; without it the text itself is the action, a JSON object.
    `observation` is the field of an observation that the model sees; without it the model sees all fields, as a JSON
    object.
    """
    importlib.import_module("openenv.core.generic_client")
    if not name.startswith((*HTTP, *WEBSOCKET)):
        raise UserError(f"openenv:{name} is no address of a server; write openenv:http://HOST:PORT")
    return partial(OpenEnvEnvironment, name, action, observation)


class OpenEnvEnvironment:
    """A session with a server of the package `openenv`."""

    def __init__(self, address: str, action: str | None, observation: str | None) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=address)
        self._action, self._observation = action, observation

    async def reset(self, example: dict[str, Any]) -> str:
        """Start with the example's seed, and return the first observation as text."""
        return self._observation_text((await self._client.reset(seed=example["seed"])).observation)

    async def step(self, text: str) -> Observation:
        """Return the observation after an action; an invalid one gets an error message, and the episode continues."""
        try:
            action = {self._action: text} if self._action else json.loads(text)
        except ValueError as error:
            return Observation(f"error: an action is a JSON object: {error}")
        if not isinstance(action, dict):
            return Observation("error: an action is a JSON object")
        result = await self._client.step(action)
        return Observation(self._observation_text(result.observation), float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    def _observation_text(self, observation: dict[str, Any]) -> str:
        if self._observation is None:
            return json.dumps({name: value for name, value in observation.items() if name not in NOT_SAID})
        return str(observation[self._observation])


def verifiers(
    name: str, /, *, harness: str = "null", **settings: Any
) -> Callable[[str, dict[str, Any]], Awaitable[float]]:
    """Return a function that plays a row against the endpoint, as an agent does. Raises UserError if there is no such
    taskset.

    verifiers:NAME       a taskset that is installed        verifiers:file.py      a file of yours that exports one

    A row plays the task with its group's number, in the `harness` of this name; the task's rewards give the score.
    `settings` are those of the taskset's configuration.
    """
    # Imported here: it is installed in a separate environment, and takes seconds to import.
    from braidrl.agents.verifiers_tasks import TaskSets

    return TaskSets(name, harness, settings)


def harbor(
    folder: str, /, *, agent: str | Mapping[str, Any] = "terminus-2", environment: Mapping[str, Any] | None = None
) -> Callable[[str, dict[str, Any]], Awaitable[float]]:
    """Return a function that plays a row as a trial of harbor against the endpoint, as an agent does. Raises UserError
    if `folder` has no tasks.

    A row plays the task with its group's number. `agent` is harbor's name, a class `file.py:Class`, or harbor's
    settings of an agent; `environment` are harbor's settings of an environment, and without any the trajectory's
    sandbox is the environment.
    """
    # Imported here: it is installed in a separate environment, and takes seconds to import.
    from braidrl.agents.harbor_tasks import Trials

    return Trials(Path(folder), agent, environment or {})


@dataclass(frozen=True)
class Sources:
    """The files that the processes of an environment see beside their interpreter's packages."""

    file: Path | None = None
    """The user's code."""
    private: tuple[Path, ...] = ()
    """Folders that each trajectory gets empty; those that exist are read while the environment is imported."""


def command_sources(command: str, params: Mapping[str, Any]) -> Sources:
    """Return the first file in a server's command."""
    words = map(Path, shlex.split(command))
    return Sources(next((word.resolve() for word in words if word.is_file()), None))


def taskset_sources(name: str, params: Mapping[str, Any]) -> Sources:
    """Return the file of a taskset of verifiers."""
    return Sources(source_of(f"{name}:"))


def harbor_sources(folder: str, params: Mapping[str, Any]) -> Sources:
    """Return the folder of tasks, the file of an agent, and the folders of a container that harbor uses."""
    agent = params.get("agent", "")
    file = source_of(agent if isinstance(agent, str) else str(agent.get("name")))
    container = () if params.get("environment") else CONTAINER
    return Sources(file, (Path(folder).resolve(), *container))


@dataclass(frozen=True)
class Library:
    """A library of environments."""

    find: Callable[..., Callable[..., Any]]
    """Returns a factory of environments, given a name and settings, or for an agent the agent."""
    module: str
    """The module whose presence shows that the library is installed."""
    package: str
    install: str
    is_agent: bool = False
    """Its environments have their own loop, and play against the endpoint."""
    sources: Callable[[str, Mapping[str, Any]], Sources] = lambda name, params: Sources()
    """Returns what the processes of an environment see, given its name and settings."""

    def check(self, name: str) -> None:
        """Raise UserError if the library of this environment is not installed."""
        package = self.module.partition(".")[0]
        if importlib.util.find_spec(package) is None or importlib.util.find_spec(self.module) is None:
            raise UserError(f"environment {name} needs {self.package}; install it with {self.install}")


COLLIDES = "; if its versions collide with others, in a separate environment, and write its rollout.environment.python"
LIBRARIES = {
    "gem": Library(gem, "gem", "gem-llm", "`pip install 'braidrl[gem]'`"),
    "harbor": Library(
        harbor,
        "harbor",
        "harbor",
        f"`pip install harbor` for Python 3.12 or later{COLLIDES}",
        is_agent=True,
        sources=harbor_sources,
    ),
    "mcp": Library(mcp, "mcp", "mcp", "`pip install 'braidrl[mcp]'`", sources=command_sources),
    "openenv": Library(openenv, "openenv", "openenv", f"`pip install openenv`{COLLIDES}"),
    "textarena": Library(textarena, "textarena", "textarena", "`pip install textarena`"),
    "verifiers": Library(
        verifiers,
        "verifiers.v1",
        "verifiers",
        f"`pip install 'verifiers>=0.4'`{COLLIDES}",
        is_agent=True,
        sources=taskset_sources,
    ),
}
"""The libraries by scheme, the beginning of a name such as `gem:game:GuessTheNumber-v0-easy`."""

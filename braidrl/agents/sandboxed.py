"""Environments and agents of the user's own, in the sandbox: what the run speaks to in their place.

SandboxedEnvironment ──requests──▶ supervisor ──▶ the trajectory's own process, a copy of the host
EnvironmentHost ──the other end of a socket for each trajectory──▶ host: has imported the environment

An answer that is not plain data of the right form is a failure of the environment, which ends its trajectory and no other.
"""

import shlex
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braidrl.agents.environments import AGENT, Environment, agent_of, environments, in_thread, is_agent
from braidrl.agents.turns import EnvironmentFailed, Observation
from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError, WorkerError
from braidrl.importing import relative_to, source_of
from braidrl.sandbox.hosts import CodeHost, Talk
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, Message

ANSWER_BYTES = 1 << 20
"""The most that an environment may say in a turn."""


async def answer_of(talk: Talk, method: str, argument: Any) -> Message:
    """Return the answer to a request. Raises EnvironmentFailed where there is none."""
    found = await talk.ask(method, argument)
    if "failure" in found:
        raise EnvironmentFailed(found["failure"], str(found.get("detail")), killed=found.get("again") is True)
    return found


class SandboxedEnvironment:
    """An environment whose methods are called in a process of its own."""

    def __init__(self, talk: Talk, made: Message) -> None:
        """`made` is the answer of the process that has made it. Raises EnvironmentFailed where that lacks the tools."""
        tools = made.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFailed("result", f"`tools` must be a list of JSON schemas, not {str(tools)[:100]}")
        self.tools, self._talk, self._closes = tools, talk, made.get("closes") is True

    async def reset(self, example: dict[str, Any]) -> Any:
        """Return the first context, which may be anything that JSON can say."""
        return (await answer_of(self._talk, "reset", example)).get("context")

    async def step(self, text: str) -> Observation:
        """Return what follows from the model's turn."""
        return observation_of(await answer_of(self._talk, "step", text))

    async def close(self) -> None:
        """Call the environment's own `close`, and end its process."""
        try:
            if self._closes and self._talk.ready:
                await answer_of(self._talk, "close", None)
        finally:
            self._talk.close()


def observation_of(found: Message) -> Observation:
    """Return an answer as an Observation. Raises EnvironmentFailed where it is none."""
    done, restart, correct = (found.get(name) for name in ("done", "restart", "correct"))
    try:
        if not (isinstance(done, bool) and isinstance(restart, bool) and isinstance(correct, bool | None)):
            raise TypeError("it says neither yes nor no")
        if isinstance(found["reward"], bool) or not isinstance(found["reward"], int | float):
            raise TypeError("its reward is not a number")
        return Observation(found.get("said", ""), float(found["reward"]), done, correct, restart)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed("result", f"its process gave an answer that is none: {error}") from error


class EnvironmentHost:
    """A process that has imported an environment or an agent, of which each trajectory gets a copy in a sandbox."""

    def __init__(self, name: str, settings: EnvironmentConfig) -> None:
        """Start it. Raises UserError where it cannot import what is named."""
        self.agent = is_agent(name)
        prefix = AGENT if name.startswith(AGENT) else ""
        self.name = prefix + relative_to(Path.cwd(), name.removeprefix(prefix))
        self._talks: set[Talk] = set()
        self._lock = threading.Lock()
        answers = 1 if self.agent else settings.max_turns + len(("make", "reset", "close"))
        self.host = CodeHost(
            "environment", "braidrl.agents.answering:player", {"name": self.name, "params": settings.params}, "rollout.environment",
            settings, settings.variables, settings.python, settings.timeout_s, answers, ANSWER_BYTES,
            file=code_of(self.name.removeprefix(prefix)), agent=self.agent,
        )  # fmt: skip
        self._load()

    def _load(self) -> None:
        """Start the process where it does not run, and have it import what is named."""
        with self._lock:
            if self.host.alive:
                return
            try:
                found = self.host.load(None)
            except TimeoutError:
                self.host.kill()
                raise UserError(
                    f"rollout.environment: {self.name} was not imported within {LOAD_LIMIT_S:g} s"
                ) from None
            except WorkerError as error:
                raise WorkerError(f"the process of {self.name} ended: {error}") from error
            if found:
                self.host.kill()
                reason = f"{found['failure']}: {found['detail']}"
                raise UserError(
                    f"rollout.environment: {self.name} cannot be imported in its sandbox ({reason}); name variables that it needs "
                    "in rollout.environment.variables, or write rollout.environment.sandbox=none"
                )

    async def talk(self) -> Talk:
        """Return a talk with a copy for a trajectory."""
        await in_thread(self._load)
        made = self.host.talk(self._talks.discard)
        self._talks.add(made)
        return made

    def listener(self) -> socket.socket | None:
        """Return a socket on which an endpoint has to serve, None where agents reach all of this machine."""
        self._load()
        return self.host.listener()

    async def make(self) -> Environment:
        """Return an environment for one trajectory. Raises EnvironmentFailed where it cannot be made."""
        talk = await self.talk()
        try:
            return SandboxedEnvironment(talk, await answer_of(talk, "make", None))
        except BaseException:
            talk.close()
            raise

    async def act(self, url: str, example: dict[str, Any]) -> Observation:
        """Return the score of an agent that talks to the endpoint at `url`. Raises EnvironmentFailed where it fails."""
        talk = await self.talk()
        try:
            return observation_of(await answer_of(talk, "act", [url, example]))
        finally:
            talk.close()

    def close(self) -> None:
        """End the process and all trajectories."""
        for talk in list(self._talks):
            talk.close()
        self.host.close()


def code_of(name: str) -> Path | None:
    """Return the file of an environment's or agent's code: of `module:name`, `file.py:name`, or the first one that a command names."""
    scheme, _, rest = name.partition(":")
    if scheme == "mcp":
        return next((Path(word).resolve() for word in shlex.split(rest) if Path(word).is_file()), None)
    return source_of(name)


class EnvironmentHosts:
    """What plays the trajectories of a run: environments and agents by name, each with its host, or none without a sandbox."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._hosts: dict[str, EnvironmentHost] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Callable[..., Any]:
        """Return what makes an environment for each trajectory, or an agent, a function of the endpoint's address and the example.

        Raises UserError where there is none of this name.
        """
        agent, params = is_agent(name), self.settings.params
        if self.settings.sandbox == "none":
            return agent_of(name, params) if agent else environments(name, params)
        return self._host(name).act if agent else self._host(name).make

    def listener(self, name: str) -> socket.socket | None:
        """Return a socket on which an agent has to be served, None where any will do."""
        return None if self.settings.sandbox == "none" else self._host(name).listener()

    def _host(self, name: str) -> EnvironmentHost:
        with self._lock:
            if name not in self._hosts:
                self._hosts[name] = EnvironmentHost(name, self.settings)
            return self._hosts[name]

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

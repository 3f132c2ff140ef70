"""The run's proxies of a user's environments and agents in the sandbox.

EnvironmentHost ──one end of a socket for each trajectory──▶ host: has imported the environment
SandboxedEnvironment ──requests over the other end──▶ the trajectory's own process, a copy of the host

An answer that is not plain data of the right form is a failure of the environment, which ends only its own trajectory.
"""

import json
import shlex
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braidrl.agents.environments import AGENT, Environment, agent_of, environments, in_thread, is_agent
from braidrl.agents.turns import EnvironmentFailed, Observation
from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError
from braidrl.importing import relative_to, source_of
from braidrl.sandbox.answers import Message
from braidrl.sandbox.hosts import CodeHost, Talk

ANSWER_BYTES = 1 << 20
"""The longest answer of an environment in a turn."""


async def answer_of(talk: Talk, method: str, argument: Any) -> Message:
    """Return the answer to a request. Raises EnvironmentFailed if there is none."""
    found = await talk.answer_to(json.dumps({method: argument}).encode() + b"\n")
    if "failure" in found:
        raise EnvironmentFailed(found["failure"], str(found.get("detail")), killed=found.get("again") is True)
    return found


class SandboxedEnvironment:
    """An environment whose methods are called in a process of its own."""

    def __init__(self, talk: Talk, made: Message) -> None:
        """Take the answer `made` of the process that made the environment. Raises EnvironmentFailed if it lacks the tools."""
        tools = made.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFailed("result", f"`tools` must be a list of JSON schemas, not {str(tools)[:100]}")
        self.tools, self._talk, self._closes = tools, talk, made.get("closes") is True

    async def reset(self, example: dict[str, Any]) -> Any:
        """Return the first context, any JSON value."""
        return (await answer_of(self._talk, "reset", example)).get("context")

    async def step(self, text: str) -> Observation:
        return observation_of(await answer_of(self._talk, "step", text))

    async def close(self) -> None:
        """Call the environment's own `close`, and end its process."""
        try:
            if self._closes and self._talk.ready:
                await answer_of(self._talk, "close", None)
        finally:
            self._talk.close()


def observation_of(found: Message) -> Observation:
    """Return an answer as an Observation. Raises EnvironmentFailed for an invalid answer."""
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
    """A process that has imported an environment or agent; each trajectory gets a forked copy in a sandbox."""

    def __init__(self, name: str, settings: EnvironmentConfig) -> None:
        """Start the process. Raises UserError if it cannot import the environment or agent."""
        self.agent = is_agent(name)
        prefix = AGENT if name.startswith(AGENT) else ""
        self.name = prefix + relative_to(Path.cwd(), name.removeprefix(prefix))
        self._talks: set[Talk] = set()
        # The code is that of `module:name`, of `file.py:name`, or the first file in a server's command.
        scheme, _, command = self.name.partition(":")
        words = (
            [Path(word).resolve() for word in shlex.split(command) if Path(word).is_file()] if scheme == "mcp" else []
        )
        file = source_of(self.name.removeprefix(prefix)) if scheme != "mcp" else next(iter(words), None)
        answers = 1 if self.agent else settings.max_turns + len(("make", "reset", "close"))
        self.host = CodeHost(
            "environment", "braidrl.agents.environments:answerer", {"name": self.name, "params": settings.params}, "rollout.environment",
            settings, settings.variables, settings.python, settings.timeout_s, answers, ANSWER_BYTES,
            file=file, agent=self.agent,
        )  # fmt: skip
        self._load()

    def _load(self) -> None:
        """Start the process if it does not run, and make it import the environment or agent."""
        found = self.host.load(None)
        if found:
            self.host.kill()
            reason = f"{found['failure']}: {found['detail']}"
            raise UserError(
                f"rollout.environment: {self.name} cannot be imported in its sandbox ({reason}); name variables that it needs "
                "in rollout.environment.variables, or write rollout.environment.sandbox=none"
            )

    async def talk(self) -> Talk:
        await in_thread(self._load)
        made = self.host.talk(self._talks.discard)
        self._talks.add(made)
        return made

    def listener(self) -> socket.socket | None:
        """Return the socket on which an endpoint must serve; None if agents reach all of this machine."""
        self._load()
        return self.host.listener()

    async def make(self) -> Environment:
        """Return an environment for one trajectory. Raises EnvironmentFailed if it cannot be made."""
        talk = await self.talk()
        try:
            return SandboxedEnvironment(talk, await answer_of(talk, "make", None))
        except BaseException:
            talk.close()
            raise

    async def act(self, url: str, example: dict[str, Any]) -> Observation:
        """Run an agent against the endpoint at `url`, and return its score. Raises EnvironmentFailed if it fails."""
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


class EnvironmentHosts:
    """The environments and agents of a run by name, each with its own host process if sandboxed."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._hosts: dict[str, EnvironmentHost] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Callable[..., Any]:
        """Return a factory of environments, or an agent: a function of the endpoint's address and the example.

        Raises UserError if there is none of this name.
        """
        agent, params = is_agent(name), self.settings.params
        if self.settings.sandbox == "none":
            return agent_of(name, params) if agent else environments(name, params)
        return self._host(name).act if agent else self._host(name).make

    def listener(self, name: str) -> socket.socket | None:
        """Return the socket on which an agent must be served; None if any will do."""
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

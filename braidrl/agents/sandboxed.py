"""The run's proxies of a user's environments and agents in the sandbox.

EnvironmentHosts ──one end of a socket for each trajectory──▶ host: has imported the environment
SandboxedEnvironment ──requests over the other end──▶ the trajectory's process, a copy of the host

An answer that is not plain data of the right form is a failure of the environment, which ends only this trajectory.
"""

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidrl.agents.environments import AGENT, AGENTS, Environment, environments, in_thread
from braidrl.agents.libraries import LIBRARIES, Sources
from braidrl.agents.turns import EnvironmentFailed, Observation
from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError
from braidrl.importing import relative_to, source_of
from braidrl.sandbox.answers import Message
from braidrl.sandbox.hosts import CodeHost, HostedCode, HostSession

ANSWER_BYTES = 1 << 20
"""The longest answer of an environment in a turn."""


async def answer_of(session: HostSession, method: str, argument: Any) -> Message:
    """Return the answer to a request. Raises EnvironmentFailed if there is none."""
    answer = await session.answer_to(json.dumps({method: argument}).encode() + b"\n")
    if "failure" in answer:
        raise EnvironmentFailed(answer["failure"], str(answer.get("detail")), killed=answer.get("again") is True)
    return answer


class SandboxedEnvironment:
    """An environment whose methods are called in a separate process."""

    def __init__(self, session: HostSession, answer: Message) -> None:
        """Store the `answer` of the process with the environment. Raises EnvironmentFailed if it lacks the tools."""
        tools = answer.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFailed("result", f"`tools` must be a list of JSON schemas, not {str(tools)[:100]}")
        self.tools, self._session, self._closes = tools, session, answer.get("closes") is True

    async def reset(self, example: dict[str, Any]) -> Any:
        """Return the first context, any JSON value, or the observation of the role that begins."""
        answer = await answer_of(self._session, "reset", example)
        return observation_of(answer) if "policy" in answer else answer.get("context")

    async def step(self, text: str) -> Observation:
        return observation_of(await answer_of(self._session, "step", text))

    async def close(self) -> None:
        """Call the environment's `close`, and end its process."""
        try:
            if self._closes and self._session.ready:
                await answer_of(self._session, "close", None)
        finally:
            self._session.close()


def observation_of(answer: Message) -> Observation:
    """Return an answer as an Observation. Raises EnvironmentFailed for an invalid answer."""
    done, restart, correct = (answer.get(name) for name in ("done", "restart", "correct"))
    try:
        if not (isinstance(done, bool) and isinstance(restart, bool) and isinstance(correct, bool | None)):
            raise TypeError("it is not true or false")
        if isinstance(answer["reward"], bool) or not isinstance(answer["reward"], int | float):
            raise TypeError("its reward is not a number")
        policy, rewards = answer.get("policy"), answer.get("rewards", {})
        return Observation(answer.get("said", ""), float(answer["reward"]), done, correct, restart, policy, rewards)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed("result", f"its process gave an answer that is none: {error}") from error


@dataclass(eq=False)
class EnvironmentHosts:
    """The environments and agents of a run by name.

    If sandboxed, a separate process imports each, and each trajectory gets a copy.
    """

    settings: EnvironmentConfig
    _hosts: dict[str, CodeHost] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, name: str) -> Callable[..., Any]:
        """Return a factory of environments, or an agent: a function of the endpoint's address and the example.

        Either raises EnvironmentFailed if the trajectory's process fails. Raises UserError if there is none of this
        name.
        """
        if self.settings.sandbox == "none":
            return environments(name, self.settings.params)
        self._host(name)

        async def make() -> Environment:
            session = await self._session(name)
            try:
                return SandboxedEnvironment(session, await answer_of(session, "make", None))
            except BaseException:
                session.close()
                raise

        async def act(url: str, example: dict[str, Any]) -> Observation:
            session = await self._session(name)
            try:
                return observation_of(await answer_of(session, "act", [url, example]))
            finally:
                session.close()

        return act if name.startswith(AGENTS) else make

    def listener(self, name: str) -> socket.socket | None:
        """Return the socket on which an agent must be served; None if any socket works."""
        return None if self.settings.sandbox == "none" else self._host(name).listener()

    def _host(self, name: str) -> CodeHost:
        """Return the process that has imported an environment or agent; start it if it is not running."""
        settings, agent = self.settings, name.startswith(AGENTS)
        prefix = AGENT if name.startswith(AGENT) else ""
        code_name = relative_to(Path.cwd(), name.removeprefix(prefix))
        relative_name = prefix + code_name
        with self._lock:
            if name not in self._hosts:
                scheme, _, rest = relative_name.partition(":")
                library = LIBRARIES.get(scheme)
                sources = library.sources(rest, settings.params) if library else Sources(source_of(code_name))
                hosted = HostedCode(
                    "environment",
                    "braidrl.agents.environments:answerer",
                    "rollout.environment",
                    settings,
                    arguments={"name": relative_name, "params": settings.params},
                    variables=settings.variables,
                    python=settings.python,
                    seconds=settings.timeout_s,
                    answers=1 if agent else settings.max_turns + len(("make", "reset", "close")),
                    answer_bytes=ANSWER_BYTES,
                    file=sources.file,
                    private=sources.private,
                    agent=agent,
                )
                self._hosts[name] = CodeHost(hosted)
            host = self._hosts[name]
        if failure := host.load(None):
            host.kill()
            if failure["failure"] == UserError.__name__:  # a message that already has its remedy
                detail = str(failure["detail"]).removeprefix("rollout.environment: ")
                raise UserError(f"rollout.environment, in its sandbox: {detail}")
            reason = f"{failure['failure']}: {failure['detail']}"
            raise UserError(
                f"rollout.environment: {relative_name} cannot be imported in its sandbox ({reason}); name "
                "variables that it needs in rollout.environment.variables, or write rollout.environment.sandbox=none"
            )
        return host

    async def _session(self, name: str) -> HostSession:
        """Return a session with the copy of a new trajectory."""
        return HostSession(await in_thread(lambda: self._host(name)))

    def close(self) -> None:
        """End all processes and trajectories."""
        for host in self._hosts.values():
            host.close()

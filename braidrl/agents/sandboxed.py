"""Environments and agents of the user's own, in the sandbox: what the run speaks to in their place.

SandboxedEnvironment ──requests──▶ supervisor ──▶ the trajectory's own process, a copy of the host
EnvironmentHost ──the other end of a socket for each trajectory──▶ host: has imported the environment

Nothing of an answer is believed: what is none is a failure of the environment, which ends its trajectory and no other.
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from braidrl.agents.environments import AGENT, Environment, agent_of, environments, in_thread, is_agent
from braidrl.agents.host import LISTEN, PLAY
from braidrl.agents.turns import EnvironmentFailed, Observation
from braidrl.cluster.local import Spawned
from braidrl.config import EnvironmentConfig
from braidrl.errors import UserError, WorkerError
from braidrl.importing import relative_to
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, PIECE_BYTES, Message, message_of
from braidrl.sandbox.untrusted import limits_of, spawn_untrusted

ANSWER_BYTES = 1 << 20
"""The most that an environment may say in a turn."""
REASON_LENGTH = 60


class Talk:
    """Requests to one trajectory's process and its answers, one at a time."""

    def __init__(self, end: socket.socket, closed: Callable[["Talk"], object]) -> None:
        """`closed` is told when it is over."""
        end.setblocking(False)
        self._end, self._closed, self._unread, self.ready = end, closed, b"", True

    async def ask(self, method: str, argument: Any) -> Message:
        """Return the answer. Raises EnvironmentFailed where there is none; nothing may be asked after that."""
        assert self.ready, "the last request has no answer"
        self.ready = False
        found = message_of(await self._answer(json.dumps({method: argument}).encode() + b"\n"))
        if "failure" in found:
            raise failure_of(found)
        self.ready = True
        return found

    async def _answer(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # there may be a last word
            await loop.sock_sendall(self._end, request)
        while b"\n" not in self._unread:
            try:
                piece = await loop.sock_recv(self._end, PIECE_BYTES)
            except ConnectionError:
                piece = b""
            if not piece:
                raise EnvironmentFailed("died", "its supervisor was killed", killed=True)
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """End the trajectory's process."""
        self.ready = False
        self._end.close()
        self._closed(self)


def failure_of(found: Message) -> EnvironmentFailed:
    """Return the failure that an answer tells of."""
    reason, detail = found["failure"], str(found.get("detail"))[:600]
    named = isinstance(reason, str) and reason.isidentifier() and len(reason) <= REASON_LENGTH
    return EnvironmentFailed(reason if named else "result", detail, killed=found.get("again") is True)


class SandboxedEnvironment:
    """An environment whose methods are called in a process of its own."""

    def __init__(self, talk: Talk, made: Message) -> None:
        """`made` is what the process told of the environment. Raises EnvironmentFailed where that is nothing."""
        tools = made.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvironmentFailed("result", f"`tools` must be a list of JSON schemas, not {str(tools)[:100]}")
        self.tools, self._talk, self._closes = tools, talk, made.get("closes") is True

    async def reset(self, example: dict[str, Any]) -> Any:
        """Return the first context, which may be anything that JSON can say."""
        return (await self._talk.ask("reset", example)).get("context")

    async def step(self, text: str) -> Observation:
        """Return what follows from the model's turn."""
        return observation_of(await self._talk.ask("step", text))

    async def close(self) -> None:
        """Call the environment's own `close`, and end its process."""
        try:
            if self._closes and self._talk.ready:
                await self._talk.ask("close", None)
        finally:
            self._talk.close()


def observation_of(found: Message) -> Observation:
    """Return an answer as an Observation. Raises EnvironmentFailed where it is none."""
    done, restart, correct = (found.get(name) for name in ("done", "restart", "correct"))
    try:
        if not (isinstance(done, bool) and isinstance(restart, bool) and isinstance(correct, bool | None)):
            raise TypeError("it says neither yes nor no")
        return Observation(found.get("said", ""), float(found["reward"]), done, correct, restart)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed("result", f"its process gave an answer that is none: {error}") from error


class EnvironmentHost:
    """A process that has imported an environment or an agent, of which each trajectory gets a copy in a sandbox."""

    def __init__(self, name: str, settings: EnvironmentConfig) -> None:
        """Start it. Raises UserError where it cannot import what is named."""
        self.agent, self.settings = is_agent(name), settings
        prefix = AGENT if name.startswith(AGENT) else ""
        self.name = prefix + relative_to(Path.cwd(), name.removeprefix(prefix))
        self._talks: set[Talk] = set()
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> Spawned:
        process = spawn_untrusted(
            "environment", "braidrl.agents.host:main", "rollout.environment", self.settings, self.settings.variables,
            self.settings.python,
        )  # fmt: skip
        try:
            self._load(process.connection)
        except BaseException as error:
            process.kill()
            process.connection.close()
            if isinstance(error, EOFError | OSError):
                raise WorkerError(f"the process of {self.name} ended: {process.describe_end()}") from error
            raise
        return process

    def _load(self, connection: Connection) -> None:
        """Have the process import what is named."""
        settings = self.settings
        answers = 1 if self.agent else settings.max_turns + len(("make", "reset", "close"))
        limits = asdict(limits_of(settings, settings.timeout_s, answers, ANSWER_BYTES))
        asked = {"load": self.name, "params": settings.params, "limits": limits}
        connection.send_bytes(json.dumps(asked).encode())
        if not connection.poll(LOAD_LIMIT_S):
            raise UserError(f"rollout.environment: {self.name} was not imported within {LOAD_LIMIT_S:g} s")
        found = json.loads(connection.recv_bytes())
        if "failure" in found:
            raise UserError(
                f"rollout.environment: {self.name} cannot be imported in its sandbox ({found['failure']}); name variables that it needs "
                "in rollout.environment.variables, or write rollout.environment.sandbox=none"
            )

    async def talk(self) -> Talk:
        """Return the way to a copy for a trajectory."""
        made = Talk(await in_thread(self._connect), self._talks.discard)
        self._talks.add(made)
        return made

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._line() as line:
            socket.send_fds(line, [PLAY], [theirs.fileno()])
        return ours

    def listener(self) -> socket.socket | None:
        """Return a socket on which an endpoint has to serve, None where agents reach all of this machine."""
        if not self.agent or self.settings.sandbox != "bubblewrap":
            return None
        with self._line() as line:
            line.send(LISTEN)
            _, (descriptor,), _, _ = socket.recv_fds(line, 1, 1)
        return socket.socket(fileno=descriptor)

    @contextlib.contextmanager
    def _line(self) -> Iterator[socket.socket]:
        """Yield the socket to the process, which is started anew where it has ended."""
        with self._lock:
            if not self._process.alive:
                self._end()
                self._process = self._start()
            with socket.socket(fileno=os.dup(self._process.connection.fileno())) as line:
                yield line

    async def make(self) -> Environment:
        """Return an environment for one trajectory. Raises EnvironmentFailed where it cannot be made."""
        talk = await self.talk()
        try:
            return SandboxedEnvironment(talk, await talk.ask("make", None))
        except BaseException:
            talk.close()
            raise

    async def act(self, url: str, example: dict[str, Any]) -> Observation:
        """Return the score of an agent that talks to the endpoint at `url`. Raises EnvironmentFailed where it fails."""
        talk = await self.talk()
        try:
            return observation_of(await talk.ask("act", [url, example]))
        finally:
            talk.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.connection.close()

    def close(self) -> None:
        """End the process and all trajectories."""
        for talk in list(self._talks):
            talk.close()
        self._end()


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

"""The process that imports environments and agents of the user's own, and the sandbox in which each trajectory has its own.

-> {"load": name, "params", "limits"}     <- {}, or a failure
-> LISTEN     <- a socket to serve agents on, in their network
-> PLAY and the end of a socket, whose requests a process of its own answers:

-> {"make": null}        <- {"tools", "closes"}         -> {"step": text}             <- an observation
-> {"reset": example}    <- {"context"}                 -> {"close": null}            <- {}
-> {"act": [url, example]}     <- an observation        any                           <- {"failure", "detail"}
"""

import asyncio
import gc
import inspect
import json
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from braidrl.agents.environments import Environment, agent_of, environments, is_agent
from braidrl.agents.turns import Observation, outcome_of
from braidrl.sandbox.sandbox import Message, SandboxLimits, raised, supervised_talk, write_message

LISTEN, PLAY = b"L", b"P"
"""What a host is asked for, beside its first message."""


def main(descriptor: int) -> None:
    """Serve the connection at a file descriptor until its other end is gone."""
    os.set_inheritable(descriptor, False)
    line = Connection(descriptor)
    asked = json.loads(line.recv_bytes())
    try:
        play = played_by(asked["load"], asked["params"])
    except raised() as error:
        line.send_bytes(json.dumps({"failure": f"{type(error).__name__}: {error}"[:600]}).encode())
        return
    line.send_bytes(b"{}")
    with socket.socket(fileno=os.dup(descriptor)) as run:
        line.close()
        serve(run, play, SandboxLimits(**asked["limits"]))


def serve(run: socket.socket, play: Callable[[int, int], None], limits: SandboxLimits) -> None:
    """Do what is asked for; the supervisor of a trajectory ends with its socket, and not with this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    gc.freeze()
    while True:
        asked, ends, _, _ = socket.recv_fds(run, 1, 1)
        if not asked:
            return
        if asked == LISTEN:
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.send_fds(run, [LISTEN], [server.fileno()])
            continue
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                run.close()
                supervised_talk(play, limits, socket.socket(fileno=ends[0]))
            finally:
                os._exit(0)
        os.close(ends[0])


def played_by(name: str, params: dict[str, Any]) -> Callable[[int, int], None]:
    """Return what plays a trajectory, with descriptors to read requests from and write answers to. Raises UserError as `environments`."""
    player = AgentPlayer(name, params) if is_agent(name) else EnvironmentPlayer(name, params)
    return partial(answer_all, player.answer)


def answer_all(answer: Callable[..., Any], requests: int, answers: int) -> None:
    """Answer each request; an exception is an answer too."""
    with asyncio.Runner() as runner, open(requests, "rb") as lines:
        for line in lines:
            ((method, argument),) = json.loads(line).items()
            try:
                found = runner.run(answer(method, argument))
            except raised() as error:
                found = {"failure": type(error).__name__, "detail": str(error)[:600]}
            write_message(answers, found)


class EnvironmentPlayer:
    """One trajectory's environment."""

    def __init__(self, name: str, params: dict[str, Any]) -> None:
        self.make = environments(name, params)
        self.environment: Environment | None = None

    async def answer(self, method: str, argument: Any) -> Message:
        """Return the answer to a request. Raises what the environment raises."""
        if method == "make":
            found = self.make()
            self.environment = made = await found if inspect.isawaitable(found) else found
            return {"tools": list(getattr(made, "tools", ())), "closes": hasattr(made, "close")}
        found = getattr(self.environment, method)(*(() if method == "close" else (argument,)))
        found = await found if inspect.isawaitable(found) else found
        return {"context": found} if method == "reset" else {} if method == "close" else observed(found)


class AgentPlayer:
    """One trajectory's agent."""

    def __init__(self, name: str, params: dict[str, Any]) -> None:
        self.agent = agent_of(name, params)

    async def answer(self, method: str, argument: Any) -> Message:
        """Return the agent's score. Raises what the agent raises."""
        found = self.agent(*argument)
        return observed(outcome_of(await found if inspect.isawaitable(found) else found))


def observed(found: Any) -> Message:
    """Return an observation as JSON. Raises TypeError for anything else."""
    if not isinstance(found, Observation):
        raise TypeError(f"`step` returned {found!r}, which is no Observation")
    correct = None if found.correct is None else bool(found.correct)
    return {
        "said": found.said, "reward": float(found.reward), "done": bool(found.done), "correct": correct, "restart": bool(found.restart),
    }  # fmt: skip

"""Answers of environments and agents in the process that imported them: `sandbox/host.py` calls `player`.

-> {"load": null}        <- {}
-> {"make": null}        <- {"tools", "closes"}         -> {"step": text}             <- an observation
-> {"reset": example}    <- {"context"}                 -> {"close": null}            <- {}
-> {"act": [url, example]}     <- an observation        any                           <- {"failure", "detail"}
"""

import inspect
from collections.abc import Awaitable
from typing import Any

from braidrl.agents.environments import Environment, agent_of, environments, is_agent
from braidrl.agents.turns import Observation, outcome_of
from braidrl.sandbox.answers import Answerer, Message


def player(name: str, params: dict[str, Any]) -> Answerer:
    """Return the answerer for one trajectory of an environment or agent, which the first request imports."""
    played: EnvironmentPlayer | AgentPlayer

    def answer(method: str, argument: Any) -> Message | Awaitable[Message]:
        nonlocal played
        if method == "load":
            played = AgentPlayer(name, params) if is_agent(name) else EnvironmentPlayer(name, params)
            return {}
        return played.answer(method, argument)

    return answer


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

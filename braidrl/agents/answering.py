"""Answers of environments and agents in the process that imported them: `sandbox/host.py` calls `player`.

-> {"load": null}        <- {}
-> {"make": null}        <- {"tools", "closes"}         -> {"step": text}             <- an observation
-> {"reset": example}    <- {"context"}                 -> {"close": null}            <- {}
-> {"act": [url, example]}     <- an observation        any                           <- {"failure", "detail"}
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from braidrl.agents.environments import agent_of, environments, is_agent
from braidrl.agents.turns import Observation, outcome_of
from braidrl.sandbox.answers import Answerer, Message


def player(name: str, params: dict[str, Any]) -> Answerer:
    """Return the answerer for one trajectory of an environment or agent, which the first request imports."""
    loaded: Callable[..., Any]
    environment: Any = None

    def answer(method: str, argument: Any) -> Message | Awaitable[Message]:
        nonlocal loaded
        if method == "load":
            loaded = agent_of(name, params) if is_agent(name) else environments(name, params)
            return {}
        return played(method, argument)

    async def played(method: str, argument: Any) -> Message:
        """Call the agent, or a method of the environment. Raises what these raise."""
        nonlocal environment
        call = loaded if method in ("act", "make") else getattr(environment, method)
        found = call(*(argument if method == "act" else () if method in ("make", "close") else (argument,)))
        found = await found if inspect.isawaitable(found) else found
        if method == "make":
            environment = found
            return {"tools": list(getattr(found, "tools", ())), "closes": hasattr(found, "close")}
        if method == "act":
            return observed(outcome_of(found))
        return {"context": found} if method == "reset" else {} if method == "close" else observed(found)

    return answer


def observed(found: Any) -> Message:
    """Return an observation as JSON. Raises TypeError for anything else."""
    if not isinstance(found, Observation):
        raise TypeError(f"`step` returned {found!r}, which is no Observation")
    correct = None if found.correct is None else bool(found.correct)
    return {
        "said": found.said, "reward": float(found.reward), "done": bool(found.done), "correct": correct, "restart": bool(found.restart),
    }  # fmt: skip

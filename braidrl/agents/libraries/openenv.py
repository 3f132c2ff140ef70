"""Environments of an OpenEnv server, by the package `openenv`: `openenv:http://host:8000`. Each trajectory is one session.

the model's text ──▶ {"message": text} or the action that it wrote as JSON ──▶ server ──▶ observation, as text
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from braidrl.agents.turns import Observation
from braidrl.errors import UserError

ADDRESSES = ("http://", "https://", "ws://", "wss://")
SETTINGS = ("action", "observation")
NOT_SAID = ("metadata",)
"""Fields of an observation that are not for the model."""


def environment(name: str, settings: Mapping[str, Any]) -> Callable[[], "OpenEnvEnvironment"]:
    """Return a factory that opens a session with a server. Raises UserError for a name that is no address.

    Settings are `action`, the field of an action for the model's text; without it the text itself is the action, a JSON object. And
    `observation`, the field of an observation that the model sees; without it the model sees all fields, as a JSON object.
    """
    if not name.startswith(ADDRESSES):
        raise UserError(f"openenv:{name} is no address of a server; write openenv:http://HOST:PORT")
    return partial(OpenEnvEnvironment, name, settings.get("action"), settings.get("observation"))


class OpenEnvEnvironment:
    """A session with a server."""

    def __init__(self, address: str, action: str | None, observation: str | None) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=address)
        self._action, self._observation = action, observation

    async def reset(self, example: dict[str, Any]) -> str:
        """Start with the example's seed, and return the first observation as text."""
        return self._said((await self._client.reset(seed=example["seed"])).observation)

    async def step(self, text: str) -> Observation:
        """Return the observation after an action; a turn that is not a valid action gets an error message, and the episode continues."""
        try:
            action = {self._action: text} if self._action else json.loads(text)
        except ValueError as error:
            return Observation(f"error: an action is a JSON object: {error}")
        if not isinstance(action, dict):
            return Observation("error: an action is a JSON object")
        result = await self._client.step(action)
        return Observation(self._said(result.observation), float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    def _said(self, observation: dict[str, Any]) -> str:
        if self._observation is None:
            return json.dumps({name: value for name, value in observation.items() if name not in NOT_SAID})
        return str(observation[self._observation])

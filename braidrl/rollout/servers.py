"""A server that generates, as the run sees it: what is posted there and what comes back, and which weights it has."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from braidrl.errors import UserError
from braidrl.rollout.dialects import Dialect
from braidrl.rollout.engine import EngineError


class Server:
    """Belongs to the event loop in which it is reached. Whoever waits for an answer waits at most `limit_s` seconds."""

    def __init__(self, url: str, dialect: Dialect, limit_s: float = 600.0) -> None:
        self.url, self.dialect, self.limit_s = url.rstrip("/"), dialect, limit_s
        self.weights = secrets.token_hex(8)
        """What its weights are called: never twice the same, by whatever run."""
        self._given = False
        self._session: ClientSession | None = None

    async def reach(self, max_sequence_tokens: int) -> None:
        """Raises UserError for a server that does not answer, or was started in a way that Braid cannot train with."""
        self._session = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=self.limit_s))
        told = f"rollout.servers: {self.url}"
        try:
            info = await self.ask("GET", self.dialect.settings)
        except UserError:
            raise UserError(
                f"{told} has no {self.dialect.settings}, and could not be given weights: start it with {self.dialect.start}"
            ) from None
        except EngineError as error:
            raise UserError(f"{error}; start it, or correct rollout.servers") from error
        missing = self.dialect.missing(info, max_sequence_tokens)
        if missing is not None:
            raise UserError(f"{told} is a server that Braid cannot train with: start it with {missing}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def load_weights(self, folder: Path) -> None:
        """Raises EngineError where it does not take them: which it has is not known then."""
        label = secrets.token_hex(8)
        try:
            for path, body in self.dialect.load_weights(str(folder), label):
                await self.ask("POST", path, body)
        except UserError as error:
            raise EngineError(f"the weights of {self.url} could not be changed: {error}") from error
        self.weights, self._given = label, True

    async def check_weights(self) -> None:
        """Raises EngineError where the server was started anew since it was given weights: others may have drawn its tokens."""
        if not self._given:
            return
        before, (path, field) = self.weights, self.dialect.label
        found = (await self.ask("GET", path)).get(field)
        if found not in (before, self.weights):
            raise EngineError(f"{self.url} was started anew, or given weights by somebody else: it has {found!r}")

    async def back(self) -> None:
        """Returns when it answers; it may have been started anew. Raises EngineError when it does not."""
        try:
            await self.ask("GET", self.dialect.settings)
        except UserError as error:
            raise EngineError(str(error)) from error
        self._given = False

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer. Raises UserError for what it refuses, and EngineError when it fails or does not answer."""
        if self._session is None or self._session.closed:
            raise EngineError(f"{self.url} has not been reached")
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status >= 400:
                    text = " ".join((await response.text()).split())[:300]
                    kind = UserError if response.status < 500 else EngineError
                    raise kind(f"{self.url}{path} answers {response.status}: {text}")
                return await response.json(content_type=None) or {}
        except TimeoutError:
            raise EngineError(f"{self.url}{path} said nothing for {self.limit_s:g} s") from None
        except ClientError as error:
            raise EngineError(f"{self.url} does not answer: {error}") from error

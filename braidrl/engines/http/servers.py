"""A generation server as the run sees it: requests, answers, and the version of its weights."""

import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from braidrl.cluster.process_groups import address_towards
from braidrl.cluster.world import Ranks
from braidrl.engines.engine import EngineError
from braidrl.engines.http.dialects import Dialect, ServerNeeds
from braidrl.errors import UserError
from braidrl.weights.collective import OfferedWeights, WeightOffer
from braidrl.weights.file import WeightFile

IDLE_S = 2.0
"""Seconds after which an idle connection is not used again; vLLM's server closes one after 5 s."""


@dataclass(frozen=True)
class NetworkSettings:
    """Settings for sending weights over the network: the run's device, and whether checksums are compared."""

    device: torch.device
    check: bool = False


class GenerationServer:
    """A server, in the event loop in which it is connected. A request waits at most `limit_s` seconds for its answer."""

    def __init__(
        self, url: str, dialect: Dialect, limit_s: float = 600.0, sending: NetworkSettings | None = None
    ) -> None:
        """Describe the server; with `sending` it receives weights over the network, otherwise it reads them from a folder."""
        self.url, self.dialect, self.limit_s, self.sending = url.rstrip("/"), dialect, limit_s, sending
        self.weights = secrets.token_hex(8)
        """The label of its weights, unique over all runs."""
        self._coming = self.weights
        """The label of the weights that it is being given."""
        self._given = False
        self._held: OfferedWeights | None = None
        """The weights that it received over the network from the run's ranks."""
        self._session: ClientSession | None = None

    def open(self) -> None:
        """Open an HTTP session in the running event loop."""
        # Connections are not reused after a training step: servers close idle ones, and this process does not notice it meanwhile.
        connector = TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        self._session = ClientSession(connector=connector, timeout=ClientTimeout(total=self.limit_s))

    async def connect(self, needs: ServerNeeds) -> None:
        """Connect to the server. Raises UserError if it does not answer, or was started with options that Braid cannot train with."""
        self.open()
        setting = f"rollout.servers: {self.url}"
        try:
            info = await self.ask("GET", self.dialect.settings)
        except UserError:
            raise UserError(
                f"{setting} has no {self.dialect.settings}, and could not be given weights: start it with {self.dialect.start}"
            ) from None
        except EngineError as error:
            raise UserError(f"{error}; start it, or correct rollout.servers") from error
        missing = self.dialect.missing(info, needs)
        if missing is None and self.sending is not None and self.dialect.network is not None:
            missing = self.dialect.network.missing(info)
        if missing is not None:
            raise UserError(f"{setting} is a server that Braid cannot train with: start it with {missing}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def load_weights(self, weights: WeightFile | OfferedWeights) -> None:
        """Change the server's weights. Raises EngineError if that fails; the version of its weights is then unknown."""
        label = self._coming = secrets.token_hex(8)
        held, self._held = self._held, None
        try:
            if isinstance(weights, OfferedWeights):
                path, field = self.dialect.label
                # A server that was restarted meanwhile holds other weights.
                same = held is not None and (await self.ask("GET", path)).get(field) == self.weights
                await self._receive(weights, label, held if same else None)
            elif self.sending is not None:
                sending, host = self.sending, urlsplit(self.url).hostname
                assert host is not None
                offer = WeightOffer(Ranks(), address_towards(host), self.limit_s, sending.device, sending.check)
                with closing(offer):
                    await self._receive(offer.keep(0, weights.parts()), label)
            else:
                for path, body in self.dialect.load_weights(str(weights.folder), label):
                    await self.ask("POST", path, body)
        except UserError as error:
            raise EngineError(f"the weights of {self.url} could not be changed: {error}") from error
        self.weights, self._given = label, True
        self._held = weights if isinstance(weights, OfferedWeights) else None

    async def _receive(self, offered: OfferedWeights, label: str, held: OfferedWeights | None = None) -> None:
        """Make the server's workers receive the offered weights."""
        network = self.dialect.network
        assert network is not None, "checked when the server was reached"
        path, field = network.workers
        workers = int((await self.ask("GET", path))[field])
        with offered.asked(workers, held) as notice:
            for call in network.receive(asdict(notice), label):
                answer = await self.ask("POST", *call)
                for failure in filter(None, answer.get("results") or ()):
                    raise EngineError(f"the weights of {self.url} could not be changed: {failure}")

    async def check_weights(self) -> None:
        """Raise EngineError if the server was restarted since it received its weights: its tokens may come from other weights."""
        if not self._given:
            return
        before, (path, field) = self.weights, self.dialect.label
        found = (await self.ask("GET", path)).get(field)
        if found not in (before, self.weights, self._coming):
            raise EngineError(f"{self.url} was restarted, or given weights by another program: it has {found!r}")

    async def check_alive(self) -> None:
        """Wait for the server's answer; it may have been restarted. Raises EngineError if there is none."""
        try:
            await self.ask("GET", self.dialect.settings)
        except UserError as error:
            raise EngineError(str(error)) from error
        self._given = False

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request. Raises UserError if the server refuses it, and EngineError if the server fails or does not answer."""
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

"""Another project's server as an engine over HTTP: it is sent token ids, and returns token ids and log-probs.

submit ──▶ gate ──▶ server ──▶ part ──▶ Response        update, abort: the server ends        what it draws with what there is,
             ▲                   |                      and a row that continues asks for the rest, with the draws that come next
             └── rest of a row ──┘

So each token has one version, and none is drawn from keys and values of earlier weights.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.data.rows import Uid
from braidrl.engines.engine import NOTHING_YET, EngineError, Load
from braidrl.engines.http.dialects import ReplyPart, ServerAnswer, ServerNeeds
from braidrl.engines.http.servers import GenerationServer
from braidrl.engines.requests import Request, Response, remaining_request
from braidrl.engines.row_request import RemoteRow, row_of
from braidrl.errors import UserError
from braidrl.observe.stalls import WORK
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile, stored_in_folder
from braidrl.weights.model_files import HubNames
from braidrl.weights.publisher import WeightSource, check_shapes

ABORT_AGAIN_S = 0.1
"""Seconds between aborts of one request: it may still be on its way to the server, so it is aborted until it is answered."""


@dataclass(frozen=True)
class ServerSpec:
    """The facts about a server's model that the run knows."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    shapes: Mapping[str, torch.Size]
    """Shape of every tensor, a tied one under each of its names."""
    slots: int
    needs: ServerNeeds
    seed: int = 0
    store: Callable[[Iterable[tuple[str, Tensor]]], WeightFile] = stored_in_folder
    """The writer of weights, to where the server reads them or they are sent from."""
    hub_names: HubNames | None = None
    """The conversion to the names that the server's loaders know, if a folder's weights have other names."""


@dataclass
class HttpRow(RemoteRow):
    """A row of this engine."""

    call: asyncio.Future[Any] | None = None
    """The pending request to the server."""
    interrupted: bool = False
    """True if the current part was ended early."""
    aborted: bool = False


class HttpEngine:
    """An engine for one server. It belongs to the event loop in which it is started."""

    def __init__(self, server: GenerationServer, spec: ServerSpec) -> None:
        self.server, self.spec = server, spec
        self.version, self.max_sequence_tokens = 0, spec.needs.tokens
        self._flights: dict[Uid, HttpRow] = {}
        self._asleep = self._updating = False
        self._failure: EngineError | None = None
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Connect to the server. Raises UserError if it does not answer, or was started with options that Braid cannot train with."""
        await self.server.connect(self.spec.needs)

    async def close(self) -> None:
        await self.server.close()

    async def submit(self, request: Request) -> Response:
        if request.uid in self._flights:
            raise ValueError(f"row {request.uid} is under way already")
        row = row_of(request, self.spec.tokenizer, self.spec.end_ids, self.max_sequence_tokens)
        flight = self._flights[request.uid] = HttpRow(row)
        try:
            with WORK.waiting():
                return await self._generate(flight)
        finally:
            del self._flights[request.uid]

    async def abort(self, uid: Uid) -> None:
        if uid not in self._flights:
            raise KeyError(f"row {uid} is not under way")
        flight = self._flights[uid]
        flight.aborted = True
        await self._wake_waiting()
        await self._interrupt(flight)

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        if source is None:
            self.version = version
            return
        with ExitStack() as stored:
            if not isinstance(source, WeightFile | OfferedWeights):
                source = stored.enter_context(closing(self.spec.store(source.tensors())))
            if isinstance(source, WeightFile):
                check_shapes(source.shapes(), self.spec.shapes)
                if self.spec.hub_names is not None:
                    file = self.spec.store(self.spec.hub_names.of(source.tensors()))
                    source = stored.enter_context(closing(file))
            self._updating = True
            try:
                await asyncio.gather(*(self._interrupt(flight) for flight in list(self._flights.values())))
                await self.server.load_weights(source)
                self.version = version
            except EngineError as error:
                # No row may be drawn from weights of unknown version.
                self._failure = error
                raise
            finally:
                self._updating = False
                await self._wake_waiting()

    async def sleep(self) -> None:
        """Refuse requests; the server keeps its memory, since its devices are its own."""
        if self._flights:
            raise RuntimeError(
                f"{self.server.url}: {len(self._flights)} rows are under way; an engine sleeps when it has none"
            )
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False
        await self._wake_waiting()

    async def recover(self) -> int:
        """Wait for a server that its owner restarts; it then has its initial weights."""
        await self.server.check_alive()
        self._failure = None
        return NOTHING_YET

    def load(self) -> Load:
        asked = sum(flight.call is not None for flight in self._flights.values())
        running = min(asked, self.spec.slots)
        return Load(self.spec.slots, running, len(self._flights) - running)

    async def _generate(self, flight: HttpRow) -> Response:
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: flight.aborted or self._failure or not (self._asleep or self._updating)
                )
            if self._failure is not None:
                raise self._failure
            rest = remaining_request(flight.row.request, flight.finished(aborted=True)) if not flight.aborted else None
            if rest is None:
                return flight.finished(aborted=True)
            answer = await self._generate_part(flight, rest)
            row = flight.row
            for token, log_prob in zip(answer.tokens, answer.log_probs, strict=True):
                flight.tokens.append(token)
                flight.log_probs.append(log_prob)
                if row.record_token(token) or token in row.stop_token_ids or len(flight.tokens) == row.limit:
                    return flight.finished()
            if not answer.tokens and not flight.interrupted:
                raise EngineError(f"{self.server.url} ended row {flight.row.request.uid} without a token")

    async def _generate_part(self, flight: HttpRow, rest: Request) -> ServerAnswer:
        """Generate tokens until the row ends or is interrupted."""
        flight.name, flight.interrupted = uuid4().hex, False
        flight.row.versions.append((len(flight.tokens), self.version))
        limit = min(rest.sampling.max_tokens, flight.row.limit - len(flight.tokens))
        asked = replace(rest, sampling=replace(rest.sampling, max_tokens=limit))
        part = ReplyPart(
            flight.name, asked, flight.row.stop_token_ids, self.spec.seed, self.server.weights, self.spec.needs.reproducible,
        )  # fmt: skip
        path, body = self.server.dialect.generate(part)
        flight.call = asyncio.ensure_future(self.server.ask("POST", path, body))
        try:
            answer = self.server.dialect.read(await flight.call)
        finally:
            flight.call.cancel()
            flight.call = None
        if answer.problem:
            raise UserError(f"rollout.servers: {self.server.url} {answer.problem}")
        await self.server.check_weights()
        return answer

    async def _interrupt(self, flight: HttpRow) -> None:
        """Make the server end the part that it draws, and wait for its answer."""
        call, name, flight.interrupted = flight.call, flight.name, True
        while call is not None and not call.done():
            await self.server.ask("POST", *self.server.dialect.abort(name))
            await asyncio.wait([call], timeout=ABORT_AGAIN_S)

    async def _wake_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()

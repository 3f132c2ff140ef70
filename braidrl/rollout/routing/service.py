"""Engines in processes of their own, or servers, as one engine, for whoever generates a batch and has no event loop.

generate ──▶ router ──▶ engine, engine, ... ──▶ Response
publish ──▶ weights, written once ──▶ every engine reads them
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from braidrl.data.rows import FinishReason
from braidrl.rollout.embedded.stepping import SteppingEngine
from braidrl.rollout.engine import Engine, EngineError, WeightSource
from braidrl.rollout.replica import EngineReplica
from braidrl.rollout.requests import Request, Response, Uid
from braidrl.rollout.routing.router import Router
from braidrl.rollout.weights.shared_file import ReadableFolder, SharedWeights, UnnamedWeights

T = TypeVar("T")
ASK_EVERY_S = 0.02
"""How often rows that are to end are asked for."""


class ServedEngine(Engine, Protocol):
    """An engine outside this process."""

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and response together."""

    async def start(self) -> None:
        """Returns when it takes requests. Raises UserError where it cannot be used as it is, EngineError where it fails."""

    async def close(self) -> None:
        """Ends what `start` began; may be called without it."""


class StoredWeights(WeightSource, Protocol):
    """One version where all engines can read it."""

    def close(self) -> None:
        """Gives the room back."""


class EngineService:
    """Holds the event loop of its engines, which goes on only while one of its methods runs. `close` ends what it started."""

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        limit_s: float = 600.0,
        store: Callable[[Iterable[tuple[str, Tensor]]], StoredWeights] = SharedWeights,
    ) -> None:
        """Starts the engines; `store` puts weights where they read them.

        Raises UserError for a model that they cannot use, and EngineError after `limit_s` seconds without a living engine.
        """
        self.engines, self._limit_s, self._store = list(engines), limit_s, store
        self._runner = asyncio.Runner()
        self._router: Router | None = None
        self._weights: StoredWeights | None = None
        try:
            self._router = self._runner.run(self._start())
        except BaseException as error:
            self.close()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise

    @property
    def router(self) -> Router:
        assert self._router is not None, "the engines are running"
        return self._router

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return self.engines[0].max_sequence_tokens

    @property
    def in_flight(self) -> int:
        """Rows that are being decoded."""
        return self.router.load().running

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        """All responses, in the order of `requests`; `on_finished` is told each that ends by itself.

        `to_end` is asked now and then for rows that are to end with what they have; it may name some that have ended.

        Raises UserError for a prompt that leaves no room for a response.
        """

        async def one(request: Request) -> Response:
            finished = await self.router.submit(request)
            if on_finished and finished.finish_reason is not FinishReason.ABORT:
                on_finished(finished)
            return finished

        async def everything() -> list[Response]:
            ending = asyncio.ensure_future(self._end(to_end)) if to_end else None
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request)) for request in requests]
            finally:
                if ending is not None:
                    ending.cancel()
                    await asyncio.gather(ending, return_exceptions=True)
            return [task.result() for task in tasks]

        try:
            return self._runner.run(everything())
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, which has the engines for as long as it runs."""
        return self._runner.run(work(self.router))

    def publish(self, version: int, source: WeightSource) -> None:
        """The engines generate with these weights from now on; a file of them is closed when the next version is there.

        Raises ValueError where the source lacks a tensor.
        """
        weights = source if isinstance(source, UnnamedWeights | ReadableFolder) else self._store(source.tensors())
        # an engine that comes back later is given those of now
        before, self._weights = self._weights, weights
        try:
            self._runner.run(self.router.update_weights(version, weights))
        finally:
            if before is not None:
                before.close()

    def close(self) -> None:
        self._runner.run(self._stop())
        self._runner.close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    async def _end(self, to_end: Callable[[], Iterable[Uid]]) -> None:
        """Ends rows that are named, until it is cancelled."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            for uid in to_end():
                # it may have ended by itself, or with the engine that it was on
                with contextlib.suppress(KeyError, EngineError):
                    await self.router.abort(uid)

    async def _start(self) -> Router:
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.start())
        return Router(self.engines, retry_s=1.0, give_up_s=self._limit_s)

    async def _stop(self) -> None:
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))


def run_with(engine: SteppingEngine | EngineService, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
    """What `work` returns, which has the engine for as long as it runs; nothing is under way afterwards."""
    if isinstance(engine, EngineService):
        return engine.run(work)
    try:
        return asyncio.run(work(EngineReplica(engine)))
    finally:
        engine.clear()

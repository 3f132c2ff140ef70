"""Engines in other processes as one engine, for callers that generate batches without an event loop.

generate ──▶ router ──▶ engine, engine, ... ──▶ Response
publish ──▶ weights, written once ──▶ every engine reads them
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from torch import Tensor

from braidrl.cluster.event_loop import Runner, run_cancelled_by_interrupts
from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import Engine, EngineError, ServedEngine, T
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.router import Router
from braidrl.weights.file import WeightFile, stored_in_memory
from braidrl.weights.publisher import WeightSource

ASK_EVERY_S = 0.02
"""Seconds between calls of `rows_to_end`."""


class EngineService:
    """Engines with an event loop that runs only inside this object's methods. `close` ends the engines."""

    is_collective = False
    memory = None
    """The engines' processes manage their own device memory."""

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        limit_s: float = 600.0,
        store: Callable[[Iterable[tuple[str, Tensor]]], WeightFile] = stored_in_memory,
    ) -> None:
        """Start the engines.

        Args:
            engines: Engines, not started yet.
            limit_s: Seconds without a living engine after which calls raise EngineError.
            store: Writes this process's weights to where the engines read them.

        Raises:
            UserError: The engines cannot use the model.
        """
        self.engines = list(engines)
        self.max_sequence_tokens = self.engines[0].max_sequence_tokens
        self._runner = Runner()
        self._router: Router | None = None
        try:
            run_cancelled_by_interrupts(self._runner, self._start())
            self._router = Router(self.engines, 1.0, limit_s, store)
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
    def slots(self) -> int:
        return self.router.load().slots

    @property
    def in_flight(self) -> int:
        return self.router.load().running

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        rows_to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        async def one(request: Request) -> Response:
            finished = await self.router.submit(request)
            if on_finished and finished.finish_reason is not FinishReason.ABORT:
                on_finished(finished)
            return finished

        async def end_rows(named: Callable[[], Iterable[Uid]]) -> None:
            while True:
                await asyncio.sleep(ASK_EVERY_S)
                for uid in named():
                    # The row may have ended by itself, or with its engine.
                    with contextlib.suppress(KeyError, EngineError):
                        await self.router.abort(uid)

        async def everything() -> list[Response]:
            ending = asyncio.ensure_future(end_rows(rows_to_end)) if rows_to_end else None
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request)) for request in requests]
            finally:
                if ending is not None:
                    ending.cancel()
                    await asyncio.gather(ending, return_exceptions=True)
            return [task.result() for task in tasks]

        try:
            return run_cancelled_by_interrupts(self._runner, everything())
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        return run_cancelled_by_interrupts(self._runner, work(self.router))

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Send new weights to the engines. Raises ValueError if the source lacks a tensor."""
        run_cancelled_by_interrupts(self._runner, self.router.update_weights(version, source))

    def clear(self) -> None:
        """Do nothing: no row is in flight between two calls."""

    def sleep(self) -> None:
        run_cancelled_by_interrupts(self._runner, self.router.sleep())

    def wake(self) -> None:
        run_cancelled_by_interrupts(self._runner, self.router.wake())

    def close(self) -> None:
        run_cancelled_by_interrupts(self._runner, self._stop())
        self._runner.close()

    async def _start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.start())

    async def _stop(self) -> None:
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))

"""An engine of this process, which draws step by step, behind the engine protocol.

submit ──▶ add ──▶ step, step, step ... ──▶ the future of each row that ended
                     └── between two steps all other tasks of the loop run
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from braidrl.engines.engine import EngineError, Load, WeightSource
from braidrl.engines.requests import Request, Response, Uid
from braidrl.errors import UserError
from braidrl.observe.stalls import WORK

if TYPE_CHECKING:
    from braidrl.engines.embedded.stepping import SteppingEngine


TURNS = 10
"""Turns of the event loop between two steps: whoever was told of a row's end gets as far as to submit the next, which takes several."""


class EngineReplica:
    """Belongs to the event loop in which it is used first. Steps run in the loop itself, so that a breakpoint stops there."""

    def __init__(self, engine: SteppingEngine, name: str = "this process's engine") -> None:
        self.engine, self.name, self.max_sequence_tokens = engine, name, engine.max_sequence_tokens
        self._answers: dict[Uid, asyncio.Future[Response]] = {}
        self._running, self._awake = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._awake.set()
        self._driver: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None

    async def start(self) -> None:
        """Return at once: the engine is there."""

    async def close(self) -> None:
        self.engine.close()

    async def submit(self, request: Request) -> Response:
        await self._awake.wait()
        if self._failure is not None:
            raise self._failure
        self.engine.add(request)
        answer = self._answers[request.uid] = asyncio.get_running_loop().create_future()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._answers.pop(request.uid, None) is not None:
                self.engine.abort(request.uid)
            raise

    async def abort(self, uid: Uid) -> None:
        if uid not in self._answers:
            raise KeyError(f"row {uid} is not under way")
        self._answer(self.engine.abort(uid))

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        self.engine.publish(version, source)

    async def sleep(self) -> None:
        if self._answers:
            raise RuntimeError(
                f"{self.name}: {len(self._answers)} rows are under way; an engine sleeps when it has none"
            )
        self._awake.clear()
        self.engine.sleep()

    async def wake(self) -> None:
        self.engine.wake()
        self._awake.set()

    async def recover(self) -> int:
        version = self.engine.recover()
        self._failure = None
        return version

    def load(self) -> Load:
        return Load(self.engine.slots, self.engine.in_flight, self.engine.waiting)

    async def _drive(self) -> None:
        while self._answers:
            await self._running.wait()
            # everybody who is ready submits first, so that they begin in the same step
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if not self._running.is_set():
                continue
            try:
                for finished in self.engine.step():
                    self._answer(finished)
                WORK.advanced()
            except UserError as error:
                self._fail(error)
            except EngineError as error:
                self._failure = error
                self._fail(error)
            except Exception as error:
                self._failure = EngineError(f"{self.name}: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
                self._fail(self._failure)

    def _answer(self, finished: Response) -> None:
        answer = self._answers.pop(finished.uid)
        if not answer.done():
            answer.set_result(finished)

    def _fail(self, error: Exception) -> None:
        answers, self._answers = self._answers, {}
        self.engine.clear()
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)

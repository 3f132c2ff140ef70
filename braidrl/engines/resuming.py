"""An engine whose rows can be preempted at any token and resumed with the weights that the engine has by then.

submit ──▶ engine ──preempt──▶ tokens, log-probs, versions so far ──resume──▶ the rest, with the draws that come next ──▶ Response

The tokens of a preempted row are prefilled again with the new weights, so no token is drawn from keys and values of earlier weights.
"""

import asyncio
import contextlib

from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import Engine, EngineError, Load
from braidrl.engines.requests import Request, Response, joined, remaining_request
from braidrl.weights.publisher import WeightSource

ABORT_AGAIN_S = 0.005
"""Seconds between aborts of one request: it may still be on its way to its engine, so it is aborted until it returns."""


class ResumingEngine:
    """A wrapper that preempts and resumes rows, and returns the parts of each row as one response."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.preempted_tokens = 0
        """Tokens of preempted rows, which are prefilled again."""
        self._running = asyncio.Event()
        self._running.set()
        self._in_engine: dict[Uid, bool] = {}
        """Rows that the engine has, and whether each is being preempted."""

    async def submit(self, request: Request) -> Response:
        parts: list[Response] = []
        rest: Request | None = request
        while rest is not None:
            if not self._running.is_set():
                await self._running.wait()
            self._in_engine[rest.uid] = False
            try:
                part = await self.engine.submit(rest)
                preempted = self._in_engine[rest.uid]
            finally:
                del self._in_engine[rest.uid]
            parts.append(part)
            if not preempted or part.finish_reason is not FinishReason.ABORT:
                break
            self.preempted_tokens += len(part.tokens)
            rest = remaining_request(rest, part)
        return joined(parts)

    async def preempt(self) -> None:
        """Preempt all rows, and return when the engine has none."""
        self._running.clear()
        while self._in_engine:
            for uid in list(self._in_engine):
                self._in_engine[uid] = True
                # The row may not have arrived yet, or has ended.
                with contextlib.suppress(KeyError, EngineError):
                    await self.engine.abort(uid)
            await asyncio.sleep(ABORT_AGAIN_S)

    async def abort(self, uid: Uid) -> None:
        await self.engine.abort(uid)

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Preempt all rows, change the weights, and resume."""
        await self.preempt()
        try:
            await self.engine.update_weights(version, source)
        finally:
            # Resumes preempted rows, and starts rows that were submitted meanwhile.
            self._running.set()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def recover(self) -> int:
        return await self.engine.recover()

    def load(self) -> Load:
        return self.engine.load()

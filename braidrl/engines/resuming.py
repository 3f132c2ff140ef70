"""An engine whose rows can be set down at a token and picked up again: they go on with whatever weights the engine has by then.

submit ──▶ engine ──set_down──▶ tokens, log-probs, versions so far ──pick_up──▶ the rest, with the draws that come next ──▶ Response

What a row has drawn is computed again under the weights that go on with it, so that no token is drawn from keys and values of others.
"""

import asyncio
import contextlib

from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import Engine, EngineError, Load
from braidrl.engines.requests import Request, Response, joined, remaining_request
from braidrl.weights.publisher import WeightSource

ABORT_AGAIN_S = 0.005
"""A request may still be on its way to its engine when it is set down: it is aborted again until it has come back."""


class ResumingEngine:
    """Puts the parts of a row together for whoever has asked for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.set_down_tokens = 0
        """Tokens that rows had when they were set down, which are computed again."""
        self._going = asyncio.Event()
        self._going.set()
        self._in_engine: dict[Uid, bool] = {}
        """Rows that the engine has, and whether each is being set down."""

    async def submit(self, request: Request) -> Response:
        parts: list[Response] = []
        rest: Request | None = request
        while rest is not None:
            await self._going.wait()
            part, was_set_down = await self._part(rest)
            parts.append(part)
            if not was_set_down or part.finish_reason is not FinishReason.ABORT:
                break
            self.set_down_tokens += len(part.tokens)
            rest = remaining_request(rest, part)
        return joined(parts)

    async def _part(self, request: Request) -> tuple[Response, bool]:
        self._in_engine[request.uid] = False
        try:
            part = await self.engine.submit(request)
            return part, self._in_engine[request.uid]
        finally:
            del self._in_engine[request.uid]

    async def set_down(self) -> None:
        """End what the engine draws, at a token; return when it has none of the rows."""
        self._going.clear()
        while self._in_engine:
            for uid in list(self._in_engine):
                self._in_engine[uid] = True
                # It may not have come there yet, or have ended.
                with contextlib.suppress(KeyError, EngineError):
                    await self.engine.abort(uid)
            await asyncio.sleep(ABORT_AGAIN_S)

    def pick_up(self) -> None:
        """Go on with what was set down, and with what was submitted meanwhile."""
        self._going.set()

    async def abort(self, uid: Uid) -> None:
        await self.engine.abort(uid)

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Set rows down, change the weights, and go on."""
        await self.set_down()
        try:
            await self.engine.update_weights(version, source)
        finally:
            self.pick_up()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def recover(self) -> int:
        return await self.engine.recover()

    def load(self) -> Load:
        return self.engine.load()

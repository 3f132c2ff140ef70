"""Rows of an engine that are preempted at any token, and resumed with the engine's weights at that time.

submit ─▶ engine ─preempt─▶ tokens, log-probs, versions so far ─resume─▶ the remaining tokens, with the next draws
    ─▶ Response
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineError, ServedEngine
from braidrl.engines.requests import Request, Response, joined, remaining_request
from braidrl.engines.stepping import EngineReplica, RowEnded, answering
from braidrl.weights.publisher import WeightSource

PREEMPT_AGAIN_S = 0.005
"""Seconds between aborts of one request: it may still be on its way to its engine, so it is aborted until it returns.
"""


class ResumingEngine:
    """An engine whose rows can be preempted at any token and resumed with the engine's weights at that time.

    The tokens of a preempted row are prefilled again with the new weights, so no token is drawn from keys and values of
    earlier weights.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self._rows: dict[Uid, tuple[Request, RowEnded]] = {}
        self._tasks: dict[Uid, asyncio.Future[Response]] = {}
        """Their requests to an engine outside this process."""
        self._preempted: set[Uid] = set()
        self._parts: dict[Uid, list[Response]] = {}
        """What preempted rows had before they resumed."""
        self._deferred: list[tuple[Sequence[Request], RowEnded]] | None = None
        """Rows that wait for new weights, while these are loaded."""

    async def submit(self, request: Request) -> Response:
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.start_rows([request], answering(answer))
        try:
            return await answer
        except asyncio.CancelledError:
            await self.withdraw([request.uid])
            raise

    def start_rows(self, requests: Sequence[Request], ended: RowEnded) -> None:
        """Start rows; the end of each makes a callback."""
        if self._deferred is not None:
            self._deferred.append((requests, ended))
            return
        self._rows.update((request.uid, (request, ended)) for request in requests)
        if isinstance(self.engine, EngineReplica):
            self.engine.start_rows(requests, self._returned)
            return
        for request in requests:
            task = self._tasks[request.uid] = asyncio.ensure_future(self.engine.submit(request))
            task.add_done_callback(partial(self._task_ended, request.uid))

    def _task_ended(self, uid: Uid, task: asyncio.Future[Response]) -> None:
        del self._tasks[uid]
        if uid in self._rows:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._returned(uid, error or task.result())

    def _returned(self, uid: Uid, result: Response | BaseException) -> None:
        """End a row, or resume it if it was preempted."""
        request, ended = self._rows.pop(uid)
        parts, was_preempted = self._parts.pop(uid, []), uid in self._preempted
        self._preempted.discard(uid)
        if isinstance(result, Response):
            parts.append(result)
            if was_preempted and (rest := remaining_request(request, result)) is not None:
                self._parts[uid] = parts
                self.start_rows([rest], ended)
                return
            result = joined(parts)
        ended(uid, result)

    async def withdraw(self, uids: Collection[Uid]) -> None:
        """Remove rows without a response, and wait until the engine has removed them."""
        if self._deferred is not None:
            withdrawn = set(uids)
            self._deferred = [
                ([r for r in requests if r.uid not in withdrawn], ended) for requests, ended in self._deferred
            ]
        tasks = [self._tasks[uid] for uid in uids if uid in self._tasks]
        for uid in uids:
            self._parts.pop(uid, None)
            if self._rows.pop(uid, None) is not None and isinstance(self.engine, EngineReplica):
                self.engine.withdraw(uid)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, uid: Uid) -> None:
        await self.engine.abort(uid)

    async def preempt(self) -> None:
        """Preempt all rows, and return when the engine has none."""
        self._deferred = [] if self._deferred is None else self._deferred
        # A cancelled request is forgotten here, but its engine may still have the row.
        while self._rows or self._tasks:
            for uid in list(self._rows):
                self._preempted.add(uid)
                # The row may not have arrived yet, or has ended.
                with contextlib.suppress(KeyError, EngineError):
                    await self.engine.abort(uid)
            if self._rows or self._tasks:
                await asyncio.sleep(PREEMPT_AGAIN_S)
        self._preempted.clear()

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Preempt all rows, change the weights, and resume."""
        await self.while_preempted(lambda: self.engine.update_weights(version, source))

    async def while_preempted(self, change: Callable[[], Awaitable[None]]) -> None:
        """Preempt all rows, wait for a change of weights, and resume."""
        await self.preempt()
        try:
            await change()
        finally:
            # Resumes preempted rows, and starts rows that were submitted in the meantime.
            deferred, self._deferred = self._deferred or [], None
            for requests, ended in deferred:
                self.start_rows(requests, ended)

"""Several engines as one: each request goes to the engine that the dispatcher chooses, and to another if that engine
dies.

submit ─▶ waiting ──dispatch──▶ engine ─▶ Response
             ▲                    |
             └──── EngineError ───┘     every `retry_s` seconds the router tries to recover it with the current weights

`EngineService` puts a router over engines in other processes for callers that generate batches without an event loop.
It writes weights once, where all engines read them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from braidrl.cluster.event_loop import Runner, all_or_none
from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import EngineError, Load, ServedEngine, Speculated, T, check_idle
from braidrl.engines.requests import Changes, EngineRow, Request, Response
from braidrl.engines.routing.dispatch import Dispatcher
from braidrl.engines.stepping import EngineReplica, SteppingEngine, in_step
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile, stored_weights
from braidrl.weights.publisher import PolicyWeights, WeightSource

logger = logging.getLogger(__name__)
ASK_EVERY_S = 0.02
"""Seconds between calls of `changes`."""


class Router:
    """An engine over several engines.

    Random numbers belong to the row, so a row that moves to another engine gets the same tokens there.
    """

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        retry_s: float = 5.0,
        give_up_s: float = 600.0,
        store: Callable[[Iterable[tuple[str, Tensor]]], WeightFile] | None = None,
    ) -> None:
        """Start with all engines alive; `start` starts them, unless the caller has.

        A failed engine is recovered every `retry_s` seconds. Requests raise EngineError when none has been alive for
        `give_up_s`. `store` writes weights where all engines read them; by default each engine gets the source.
        """
        self.engines, self._retry_s, self._give_up_s, self._store = list(engines), retry_s, give_up_s, store
        self.max_sequence_tokens = self.engines[0].max_sequence_tokens
        self._slot_waiters: dict[Uid, asyncio.Future[None]] = {}
        """A future for each row that waits for an engine: done when it has one, or when it is aborted."""
        self._calls: dict[Uid, asyncio.Future[Response]] = {}
        self._aborted: set[Uid] = set()
        self._recovering: dict[int, asyncio.Task[None]] = {}
        self.failures: dict[int, EngineError] = {}
        self._version: int | None = None
        self._sources: dict[str | None, WeightSource] = {}
        """The weights that engines hold; of an engine of several policies those of each."""
        self._stored: WeightFile | None = None
        """The weights file that this router stored."""
        self._asleep = False

    @cached_property
    def _dispatcher(self) -> Dispatcher:
        """Make the dispatcher when the engines have started and report their slots."""
        return Dispatcher([engine.load().slots for engine in self.engines])

    @property
    def alive(self) -> list[int]:
        """Return the numbers of the engines that accept requests."""
        return [number for number, state in enumerate(self._dispatcher.engines) if state.alive]

    async def start(self) -> None:
        async with all_or_none() as group:
            for engine in self.engines:
                group.create_task(engine.start())

    async def submit(self, request: Request) -> Response:
        uid = request.uid
        self._dispatcher.add(uid, len(request.prompt))
        finished: Response | None = None
        try:
            while finished is None:
                if (number := await self._wait_for_slot(uid)) is None:
                    # The row was aborted before it had an engine.
                    return EngineRow(request, request.sampling.max_tokens).finished(aborted=True)
                call = self._calls[uid] = asyncio.ensure_future(self.engines[number].submit(request))
                try:
                    await asyncio.wait([call])
                finally:
                    self._calls.pop(uid, None)
                    call.cancel()
                if call.cancelled():
                    continue
                if isinstance(error := call.exception(), EngineError):
                    self._engine_failed(number, error)
                else:
                    finished = call.result()
            return finished
        finally:
            self._aborted.discard(uid)
            self._dispatcher.done(uid, None if finished is None else len(finished.tokens))
            self._send()

    async def abort(self, uid: Uid) -> None:
        number = self._dispatcher.engine_of(uid)
        if number is not None and uid in self._calls:
            await self.engines[number].abort(uid)
            return
        self._aborted.add(uid)
        self._wake(uid)

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Send new weights to the engines, stored once if only this process has them, and free the earlier version."""
        before = stored = None
        local = None if isinstance(source, WeightFile | OfferedWeights | PolicyWeights) else source
        if self._store is not None and local is not None:
            source = stored = self._store(local.tensors())
        self._version = version
        if source is not None:
            # An engine that recovers later gets these weights, even after versions that do not change them.
            before, self._stored = self._stored, stored
            self._sources[source.role if isinstance(source, PolicyWeights) else None] = source
        try:
            await self._everywhere(lambda engine: engine.update_weights(version, source))
        finally:
            if before is not None:
                before.close()

    async def sleep(self) -> None:
        check_idle("the router", self._dispatcher.jobs, "sleeps")
        self._asleep = True
        await self._everywhere(lambda engine: engine.sleep())

    async def wake(self) -> None:
        self._asleep = False
        await self._everywhere(lambda engine: engine.wake())
        self._send()

    async def recover(self) -> int:
        """Recover every dead engine. Raises EngineError if one cannot be recovered now."""
        for number, state in enumerate(self._dispatcher.engines):
            if not state.alive:
                await self._recover(number)
        return self._version or 0

    def load(self) -> Load:
        loads = [self.engines[number].load() for number in self.alive]
        waiting = sum(load.waiting for load in loads) + len(self._dispatcher.waiting)
        counted = [load.speculated for load in loads if load.speculated is not None]
        speculated = sum(counted, Speculated()) if counted else None
        return Load(sum(load.slots for load in loads), sum(load.running for load in loads), waiting, speculated)

    def waiting_rows(self) -> list[Uid]:
        """Return the rows that wait for an engine, in their order."""
        return list(self._dispatcher.waiting)

    async def close(self) -> None:
        """Stop recovering dead engines, close all, and free the stored weights."""
        for task in self._recovering.values():
            task.cancel()
        await asyncio.gather(*self._recovering.values(), return_exceptions=True)
        if self._stored is not None:
            self._stored.close()
        self._stored = None
        self._sources.clear()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _wait_for_slot(self, uid: Uid) -> int | None:
        """Wait for an engine with a free slot.

        Returns None for an aborted row. Raises EngineError after `give_up_s` without a living engine.
        """
        loop = asyncio.get_running_loop()
        # Rows that are submitted together are dispatched together, in their order.
        loop.call_soon(self._send)
        try:
            while uid not in self._aborted:
                # The engine that a row was assigned to may fail before this task resumes.
                if (number := self._dispatcher.engine_of(uid)) is not None:
                    return number
                waiting = self._slot_waiters[uid] = loop.create_future()
                await asyncio.wait([waiting], timeout=self._give_up_s)
                if not waiting.done() and not self.alive:
                    causes = "; ".join(str(error) for error in self.failures.values())
                    raise EngineError(f"no engine has been alive for {self._give_up_s:g} s: {causes}")
            return None
        finally:
            self._slot_waiters.pop(uid, None)

    def _wake(self, uid: Uid) -> None:
        """Let a row that waits for an engine check again."""
        if uid in self._slot_waiters and not self._slot_waiters[uid].done():
            self._slot_waiters[uid].set_result(None)

    def _send(self) -> None:
        if not self._asleep:
            for uid, _ in self._dispatcher.assign():
                self._wake(uid)

    def _engine_failed(self, number: int, error: EngineError) -> None:
        if not self._dispatcher.engines[number].alive:
            return
        self.failures[number] = error
        logger.warning("%s; its rows go to other engines, or wait until it is back", error)
        for uid in self._dispatcher.fail(number):
            if uid in self._calls:
                self._calls.pop(uid).cancel()
        self._recovering[number] = asyncio.ensure_future(self._recover_later(number))

    async def _recover_later(self, number: int) -> None:
        while not self._dispatcher.engines[number].alive:
            await asyncio.sleep(self._retry_s)
            try:
                await self._recover(number)
            except Exception as error:
                # This includes unexpected errors: otherwise the engine would never be retried.
                failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
                self.failures[number] = failure

    async def _recover(self, number: int) -> None:
        engine, asleep = self.engines[number], None
        version = await engine.recover()
        # Weights may be published, and engines sent to sleep, while this engine catches up.
        while asleep is not self._asleep or self._version not in (None, version):
            if self._version not in (None, version):
                version = self._version or 0
                sources: list[WeightSource | None] = [*self._sources.values()]
                for source in sources or [None]:
                    await engine.update_weights(version, source)
            else:
                asleep = self._asleep
                await (engine.sleep() if asleep else engine.wake())
        self.failures.pop(number, None)
        self._dispatcher.engines[number].alive = True
        self._send()

    async def _everywhere(self, call: Callable[[ServedEngine], Awaitable[None]]) -> None:
        alive = self.alive
        results = await asyncio.gather(*(call(self.engines[number]) for number in alive), return_exceptions=True)
        for number, result in zip(alive, results, strict=True):
            if isinstance(result, EngineError):
                self._engine_failed(number, result)
            elif isinstance(result, BaseException):
                raise result


class EngineService:
    """Engines with an event loop that runs only inside this object's methods. `close` ends the engines.

    Its methods are those of a `SteppingEngine`. The engine processes manage their device memory.
    """

    is_collective, group, memory, phases = False, None, None, None

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        limit_s: float = 600.0,
        store: Callable[[Iterable[tuple[str, Tensor]]], WeightFile] = stored_weights,
        beside: "EngineService | None" = None,
    ) -> None:
        """Start the engines.

        Raises UserError if they cannot use the model. Calls raise EngineError after `limit_s` seconds without a living
        engine. `store` writes weights to where the engines read them. Two services share one event loop if the first is
        passed as `beside`; the second is closed first.
        """
        self.router = Router(engines, 1.0, limit_s, store)
        self.engines, self.max_sequence_tokens = self.router.engines, self.router.max_sequence_tokens
        self._runner: Runner = Runner() if beside is None else beside._runner
        self._shares = beside is not None
        try:
            self.run(lambda router: router.start())
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        return self.router.load().slots

    @property
    def in_flight(self) -> int:
        return self.router.load().running

    @property
    def waiting(self) -> int:
        return self.router.load().waiting

    def waiting_rows(self) -> list[Uid]:
        """Return the rows that wait for an engine, in their order."""
        return self.router.waiting_rows()

    @property
    def speculated(self) -> Speculated | None:
        return self.router.load().speculated

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        changes: Callable[[], Changes] | None = None,
    ) -> list[Response]:
        async def answer(request: Request) -> Response:
            finished = await self.router.submit(request)
            if on_finished and finished.finish_reason is not FinishReason.ABORT:
                on_finished(finished)
            return finished

        async def every(router: ServedEngine) -> list[Response]:
            async with all_or_none() as group:
                first = [group.create_task(answer(request)) for request in requests]
                tasks, more = list(first), changes is not None
                while changes is not None and (more or not all(task.done() for task in tasks)):
                    running = [task for task in tasks if not task.done()]
                    await (asyncio.wait(running, timeout=ASK_EVERY_S) if running else asyncio.sleep(ASK_EVERY_S))
                    change = changes()
                    for uid in change.ended:
                        # The row may have ended, or its engine.
                        with contextlib.suppress(KeyError, EngineError):
                            await router.abort(uid)
                    tasks += [group.create_task(answer(request)) for request in change.added]
                    more = change.more
            return [task.result() for task in first]

        return self.run(every)

    def run(self, work: Callable[[ServedEngine], Coroutine[Any, Any, T]]) -> T:
        return self._runner.run(work(self.router))

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Send new weights to the engines. Raises ValueError if the source lacks a tensor."""
        self.run(lambda router: router.update_weights(version, source))

    def clear(self, release: bool = True) -> None:
        """Do nothing: no row is in flight between two calls."""

    def sleep(self) -> None:
        self.run(lambda router: router.sleep())

    def wake(self) -> None:
        self.run(lambda router: router.wake())

    def close(self) -> None:
        self.run(lambda router: router.close())
        if not self._shares:
            self._runner.close()


RoleEngine = SteppingEngine | EngineService
"""A role's engine as the process that executes its stages uses it: whole batches, without an event loop of its own."""


class PolicyEngines:
    """The engines of roles that play together, in one event loop; each request goes to its policy's engine."""

    def __init__(self, engines: Mapping[str, ServedEngine]) -> None:
        """Store the started engines by role."""
        self.engines, self._of_row = dict(engines), dict[Uid, ServedEngine]()
        self.max_sequence_tokens = min(engine.max_sequence_tokens for engine in self.engines.values())

    async def start(self) -> None:
        """Do nothing: the engines are started."""

    async def submit(self, request: Request) -> Response:
        engine = self._of_row[request.uid] = self.engines[str(request.policy)]
        try:
            return await engine.submit(request)
        finally:
            del self._of_row[request.uid]

    async def abort(self, uid: Uid) -> None:
        await self._of_row[uid].abort(uid)

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        """Raise ValueError: each policy has separate weights, published to its engine."""
        raise ValueError(f"weights of one policy, for engines of {', '.join(self.engines)}")

    async def sleep(self) -> None:
        for engine in self.engines.values():
            await engine.sleep()

    async def wake(self) -> None:
        for engine in self.engines.values():
            await engine.wake()

    async def recover(self) -> int:
        return min([await engine.recover() for engine in self.engines.values()])

    def load(self) -> Load:
        """Return the load of all engines; rows start while the first has slots, as each plays one turn at a time."""
        loads = [engine.load() for engine in self.engines.values()]
        counted = [load.speculated for load in loads if load.speculated is not None]
        speculated = sum(counted, Speculated()) if counted else None
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        return Load(loads[0].slots, running, waiting, speculated)

    async def close(self) -> None:
        """Do nothing: each engine belongs to its role."""


def run_together(engines: Mapping[str, RoleEngine], work: Callable[[ServedEngine], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with exclusive use of the engines of these roles, and return its result.

    Services share one event loop.
    """
    first = next(iter(engines.values()))
    if all(engine is first for engine in engines.values()):
        return first.run(work)
    services = {role: engine.router for role, engine in engines.items() if isinstance(engine, EngineService)}
    if isinstance(first, EngineService):
        return first.run(lambda _: work(PolicyEngines(services)))
    stepping = {role: engine for role, engine in engines.items() if isinstance(engine, SteppingEngine)}
    try:
        replicas = {role: EngineReplica(engine) for role, engine in stepping.items()}
        played = work(PolicyEngines(replicas))
        collective = any(engine.is_collective for engine in stepping.values())
        with Runner() as runner:
            return runner.run(in_step(list(replicas.values()), played) if collective else played)
    finally:
        for engine in stepping.values():
            engine.clear()

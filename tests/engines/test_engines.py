"""Every engine passes the contract; rows survive the death of engines, and replicas sample the same tokens as one
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy

import pytest
import torch

from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.engine import Engine, EngineError
from braidrl.engines.engine_contract import CHECKS, EngineUnderTest, requests, under_way
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.resuming import ResumingEngine
from braidrl.engines.routing.router import Router
from braidrl.engines.stepping import EngineReplica, SteppingEngine
from braidrl.weights.publisher import ModelWeights
from tests.engines.tiny import END, make_model, make_tokenizer, training_log_probs

MODEL, TOKENIZER = make_model(), make_tokenizer()
LIMIT = 128


def replica(slots: int = 16) -> EngineReplica:
    """Return an engine with its own module, so that weights can change."""
    return EngineReplica(EmbeddedEngine(deepcopy(MODEL), TOKENIZER, Decoding(slots, LIMIT)))


def copy_in_float64() -> EngineReplica:
    return EngineReplica(EmbeddedEngine(deepcopy(MODEL).double(), TOKENIZER, Decoding(16, LIMIT)))


def other_weights() -> ModelWeights:
    model = deepcopy(MODEL)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    return ModelWeights(model)


def in_training(asked: list[Request], finished: list[Response]) -> list[torch.Tensor]:
    dtype = finished[0].log_probs.dtype
    return training_log_probs(deepcopy(MODEL).to(dtype), asked, finished)


def subject(make: Callable[[], Engine]) -> EngineUnderTest:
    return EngineUnderTest(make, END, LIMIT, in_training, other_weights)  # type: ignore[arg-type]


ENGINES: dict[str, Callable[[], Engine]] = {
    "embedded": replica,
    "embedded copy in float64": copy_in_float64,
    "router over two": lambda: Router([replica(), replica()]),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENGINES)
def test_engines_keep_the_contract(name: str, check: Callable[[EngineUnderTest], Awaitable[None]]) -> None:
    asyncio.run(check(subject(ENGINES[name])))  # type: ignore[arg-type]


@pytest.mark.soak
def test_four_replicas_draw_the_tokens_of_one_in_any_order() -> None:
    submitted = requests(subject(replica), 60, tokens=10)

    async def gather(engine: Engine, order: list[Request]) -> dict[tuple[int, int, int], list[int]]:
        tasks = []
        for number, request in enumerate(order):
            tasks.append(asyncio.ensure_future(engine.submit(request)))
            if number % 7 == 0:
                await asyncio.sleep(0.002)
        return {row.uid: row.tokens.tolist() for row in await asyncio.gather(*tasks)}

    one = asyncio.run(gather(replica(64), submitted))
    for seed in range(2):
        order = [submitted[i] for i in torch.randperm(60, generator=torch.Generator().manual_seed(seed)).tolist()]
        assert asyncio.run(gather(Router([replica() for _ in range(4)]), order)) == one


def break_after(dying: EngineReplica, steps: int) -> None:
    """Makes the engine's forward pass raise once, after a number of passes."""
    left = [steps]

    def forward(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is gone")

    dying.engine.model.lm_head.register_forward_pre_hook(forward)


@pytest.mark.parametrize("steps", [1, 6, 11])
def test_an_engines_death_loses_or_repeats_no_row_and_changes_no_token(steps: int) -> None:
    submitted = requests(subject(replica), 40, tokens=10)

    async def gather(router: Router) -> list[Response]:
        answered = []

        async def one(request: Request) -> None:
            answered.append(await router.submit(request))

        await asyncio.gather(*(one(request) for request in submitted))
        return answered

    async def with_death() -> tuple[list[Response], int, list[int]]:
        dying = replica()
        router = Router([dying, replica()], retry_s=0.02)
        await router.update_weights(5, ModelWeights(MODEL))
        break_after(dying, steps)
        answered = await gather(router)
        for _ in range(200):
            if len(router.alive) == 2:
                break
            await asyncio.sleep(0.01)
        after = await dying.submit(submitted[0])
        await router.close()
        return answered, len(router.alive), after.versions.tolist()

    answered, alive, versions = asyncio.run(with_death())
    assert sorted(row.uid for row in answered) == [request.uid for request in submitted]
    assert alive == 2 and versions == [5] * 10
    expected = {row.uid: row.tokens.tolist() for row in asyncio.run(gather(Router([replica(64)])))}
    assert {row.uid: row.tokens.tolist() for row in answered} == expected


class FailsForOneRow(EngineReplica):
    """An engine that fails for its first row in the turn of the event loop in which it answers the others."""

    failed = False

    def _answer(self, finished: Response) -> None:
        if self.failed:
            super()._answer(finished)
        else:
            self.failed = True
            self._ended.pop(finished.uid)(finished.uid, EngineError("the line is cut"))


def test_rows_answered_in_the_turn_in_which_their_engine_fails_are_answered_once() -> None:
    async def run() -> None:
        failing = FailsForOneRow(replica().engine)
        router = Router([failing], retry_s=0.02)
        submitted = requests(subject(replica), 6)
        answered = await asyncio.gather(*map(router.submit, submitted))
        assert [row.uid for row in answered] == [request.uid for request in submitted]
        assert router.load().rows == 0 and not router._slot_waiters
        await router.close()

    asyncio.run(run())


def test_a_dead_engine_recovers_with_the_weights_that_it_missed() -> None:
    async def run() -> list[list[int]]:
        dying = replica()
        router = Router([dying, replica()], retry_s=60)
        break_after(dying, 1)
        await asyncio.gather(*(router.submit(request) for request in requests(subject(replica), 20)))
        assert len(router.alive) == 1
        await router.update_weights(4, other_weights())
        # The role skips an iteration: the next version has the same weights.
        await router.update_weights(5)
        assert dying.engine.version == 0
        await router.recover()
        submitted = requests(subject(replica), 1)[0]
        finished = [await engine.submit(submitted) for engine in router.engines]
        await router.close()
        assert [row.versions[0] for row in finished] == [5, 5]
        return [row.tokens.tolist() for row in finished]

    recovered, other = asyncio.run(run())
    assert recovered == other


def test_weights_wait_until_the_engine_has_removed_a_cancelled_row() -> None:
    async def run() -> None:
        router = Router([replica()])
        resuming, (request, *_) = ResumingEngine(router), requests(subject(replica), 1, tokens=60)
        cancelled = await under_way(router, request, resuming)
        cancelled.cancel()
        await asyncio.sleep(0)
        await resuming.update_weights(5, other_weights())
        assert set((await resuming.submit(request)).versions.tolist()) == {5}
        await router.close()

    asyncio.run(run())


class FailsToRecover(EngineReplica):
    """An engine that fails once more while it recovers, with an error of its own."""

    tried = 0

    async def recover(self) -> int:
        self.tried += 1
        if self.tried == 1:
            raise OSError("the disk is full")
        return await super().recover()


def test_an_engine_whose_recovery_fails_with_any_error_is_tried_again() -> None:
    async def run() -> None:
        dying = FailsToRecover(replica().engine)
        break_after(dying, 1)
        router = Router([dying], retry_s=0.02)
        finished = await router.submit(requests(subject(replica), 1)[0])
        assert len(finished.tokens) == 12 and dying.tried == 2
        await router.close()

    asyncio.run(run())


class WakesLate(EngineReplica):
    """An engine that is awake only after the test says so."""

    may_wake: asyncio.Event

    async def wake(self) -> None:
        await self.may_wake.wait()
        await super().wake()


def test_weights_published_while_an_engine_recovers_reach_it() -> None:
    async def run() -> None:
        dying = WakesLate(replica().engine)
        dying.may_wake = asyncio.Event()
        router = Router([dying, replica()], retry_s=60)
        break_after(dying, 1)
        await asyncio.gather(*map(router.submit, requests(subject(replica), 20)))
        recovering = asyncio.ensure_future(router.recover())
        await asyncio.sleep(0.01)
        await router.update_weights(5, other_weights())
        dying.may_wake.set()
        await recovering
        assert len(router.alive) == 2 and dying.engine.version == 5
        await router.close()

    asyncio.run(run())


class FailsAtOneRow(EngineReplica):
    """An engine that fails at a row's request while others are drawn."""

    bad: Uid | None = None

    def __init__(self, engine: SteppingEngine) -> None:
        super().__init__(engine)
        self.cut = asyncio.Event()

    async def submit(self, request: Request) -> Response:
        if request.uid == self.bad:
            self.bad = None
            await self.cut.wait()
            raise EngineError("the line is cut")
        return await super().submit(request)


def test_rows_given_to_an_engine_in_the_turns_in_which_it_fails_are_drawn_when_it_is_back() -> None:
    async def run(turns: int) -> None:
        failing, submitted = FailsAtOneRow(replica().engine), requests(subject(replica), 6, tokens=8)
        failing.bad, router = submitted[0].uid, Router([failing], retry_s=0.02)
        first = asyncio.ensure_future(router.submit(submitted[0]))
        while failing.bad is not None:
            await asyncio.sleep(0)
        failing.cut.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        later = [asyncio.ensure_future(router.submit(request)) for request in submitted[1:4]]
        await asyncio.sleep(0)
        await router.abort(submitted[3].uid)
        finished = await asyncio.gather(first, *later, *map(router.submit, submitted[4:]))
        assert [len(row.tokens) for row in finished] == [8, 8, 8, 0, 8, 8]
        assert router.load().rows == 0
        await router.sleep()
        await router.close()

    for turns in range(8):
        asyncio.run(run(turns))


def test_a_row_can_be_aborted_in_the_turn_in_which_its_engine_fails() -> None:
    async def run() -> None:
        failing, submitted = FailsAtOneRow(replica().engine), requests(subject(replica), 4, tokens=60)
        failing.bad = submitted[0].uid
        router = Router([failing], retry_s=0.02)
        tasks = [asyncio.ensure_future(router.submit(request)) for request in submitted]
        asyncio.get_running_loop().call_later(0.01, failing.cut.set)
        while router.alive:
            await asyncio.sleep(0)
        await router.abort(submitted[2].uid)
        finished = await asyncio.gather(*tasks)
        assert [len(row.tokens) for row in finished] == [60, 60, 0, 60]
        assert router.load().rows == 0
        await router.close()

    asyncio.run(run())


def test_pending_calls_fail_with_the_reason_when_no_engine_is_left() -> None:
    async def run() -> None:
        dying = replica()
        break_after(dying, 1)
        router = Router([dying], retry_s=60, give_up_s=0.05)
        try:
            await router.submit(requests(subject(replica), 1)[0])
        finally:
            await router.close()

    with pytest.raises(EngineError, match=r"no engine .*0.05 s:.*device is gone"):
        asyncio.run(run())


def test_a_row_can_be_aborted_while_it_waits_for_an_engine() -> None:
    async def run() -> None:
        router = Router([replica(16)])
        submitted = requests(subject(replica), 18, tokens=20)
        tasks = [asyncio.ensure_future(router.submit(request)) for request in submitted]
        await asyncio.sleep(0)
        await router.abort(submitted[0].uid)
        while router.load().running < 16:
            await asyncio.sleep(0.001)
        await router.abort(submitted[17].uid)
        finished = await asyncio.gather(*tasks)
        assert [len(row.tokens) for row in finished] == [0] + [20] * 16 + [0]
        assert router.load().rows == 0

    asyncio.run(run())

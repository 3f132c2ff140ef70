"""The contract of engines, as checks that run against Braid's engines and against users' own.

    for check in CHECKS:
        asyncio.run(check(subject))

A failed check raises AssertionError. `subject.make()` returns an engine with weights of version 0 and no row in flight;
its model must be random enough that greedy tokens differ between prompts.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from braidrl.data.rows import FinishReason
from braidrl.engines.engine import Engine, ServedEngine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.engines.routing.resuming import ResumingEngine
from braidrl.errors import UserError
from braidrl.weights.publisher import WeightSource


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine under test, and the facts about its model that the checks need."""

    make: Callable[[], ServedEngine]
    vocabulary: int
    """Token ids below this are plain tokens, none of which ends a response."""
    max_sequence_tokens: int
    training_log_probs: Callable[[Sequence[Request], Sequence[Response]], list[Tensor]]
    """Training's log-probs of the responses, (T,) each, under the weights of version 0."""
    other_weights: Callable[[], WeightSource]
    """Weights of the same shapes that generate other tokens."""
    tolerance: float = 1e-5
    """Absolute tolerance of log-probs against training's."""
    long: int = 40
    """Length in tokens of a response that is still being drawn when its engine gets another call."""


def requests(subject: EngineUnderTest, count: int, tokens: int = 12) -> list[Request]:
    """Make requests in groups of two, with prompts of different lengths; each draws exactly `tokens` tokens."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, subject.vocabulary, (3 + 2 * g,), generator=generator) for g in range(count)]
    sampling = SamplingParams(max_tokens=tokens, ends=False)
    return [Request((0, i // 2, i % 2), prompts[i // 2], sampling) for i in range(count)]


def drawn(request: Request, **settings: Any) -> Request:
    """Return the request with changed sampling settings."""
    return replace(request, sampling=replace(request.sampling, **settings))


async def all_of(engine: Engine, to_submit: Sequence[Request]) -> list[Response]:
    return list(await asyncio.gather(*(engine.submit(request) for request in to_submit)))


async def under_way(
    engine: ServedEngine, request: Request, resuming: ResumingEngine | None = None
) -> asyncio.Task[Response]:
    """Submit a request and return while it is decoded; repeat if it ends before that is observed."""
    for _ in range(100):
        task = asyncio.ensure_future((resuming or engine).submit(request))
        while not task.done():
            if engine.load().running:
                return task
            await asyncio.sleep(0.001)
        await task
    raise AssertionError(f"no row of 100 was ever seen under way: {engine.load()}")


async def every_request_is_answered_once_with_what_it_asked_for(subject: EngineUnderTest) -> None:
    engine, submitted = subject.make(), requests(subject, 10)
    for request, finished in zip(submitted, await all_of(engine, submitted), strict=True):
        assert finished.uid == request.uid
        assert len(finished.tokens) == len(finished.log_probs) == len(finished.versions) == 12
        assert finished.tokens.dtype == finished.versions.dtype == torch.int64
        assert finished.finish_reason is FinishReason.LENGTH
        assert finished.versions.tolist() == [0] * 12
    assert engine.load().rows == 0


async def log_probs_are_those_of_training(subject: EngineUnderTest) -> None:
    engine, submitted = subject.make(), requests(subject, 8)
    submitted = [
        drawn(request, temperature=0.7, top_p=0.8) if i % 2 else request for i, request in enumerate(submitted)
    ]
    finished = await all_of(engine, submitted)
    for response, expected in zip(finished, subject.training_log_probs(submitted, finished), strict=True):
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=subject.tolerance)


async def a_later_turn_has_the_log_probs_of_training(subject: EngineUnderTest) -> None:
    """Check the log-probs of a later turn, even if an engine caches earlier turns."""
    engine, (request, *_), generator = subject.make(), requests(subject, 1), torch.Generator().manual_seed(8)
    prompt = torch.randint(0, subject.vocabulary, (2 * subject.max_sequence_tokens // 3,), generator=generator)
    observed = torch.randint(0, subject.vocabulary, (3,), generator=generator)
    first = replace(request, prompt=prompt)
    turn = await engine.submit(first)
    later = replace(first, prompt=torch.cat([prompt, turn.tokens, observed]), first_draw=len(turn.tokens))
    finished = [turn, await engine.submit(later)]
    for response, expected in zip(finished, subject.training_log_probs([first, later], finished), strict=True):
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=subject.tolerance)


async def a_rows_tokens_depend_on_the_row_alone(subject: EngineUnderTest) -> None:
    submitted = requests(subject, 9)
    together = await all_of(subject.make(), submitted)
    backwards = await all_of(subject.make(), submitted[::-1])
    engine = subject.make()
    alone = [await engine.submit(request) for request in submitted[:3]]
    assert [r.tokens.tolist() for r in together] == [r.tokens.tolist() for r in backwards[::-1]]
    assert [r.tokens.tolist() for r in together[:3]] == [r.tokens.tolist() for r in alone]
    assert together[0].tokens.tolist() != together[1].tokens.tolist(), "samples of a group differ"


async def a_row_goes_on_where_its_earlier_draws_ended(subject: EngineUnderTest) -> None:
    engine, (request, *_) = subject.make(), requests(subject, 1)
    complete = await engine.submit(request)
    started = await engine.submit(drawn(request, max_tokens=5))
    longer = replace(request, prompt=torch.cat([request.prompt, started.tokens]), first_draw=5)
    rest = await engine.submit(drawn(longer, max_tokens=7))
    assert torch.cat([started.tokens, rest.tokens]).tolist() == complete.tokens.tolist()


async def stop_tokens_end_a_row_and_belong_to_it(subject: EngineUnderTest) -> None:
    engine, (request, *_) = subject.make(), requests(subject, 1)
    free = await engine.submit(request)
    stop = int(free.tokens[4])
    stopped = await engine.submit(drawn(request, stop_token_ids=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: free.tokens.tolist().index(stop) + 1].tolist()


async def a_request_without_room_is_refused_and_harms_no_other(subject: EngineUnderTest) -> None:
    engine, (request, *_) = subject.make(), requests(subject, 1)
    long = replace(request, uid=(0, 99, 0), prompt=torch.zeros(subject.max_sequence_tokens, dtype=torch.int64))
    fine, refused = await asyncio.gather(engine.submit(request), engine.submit(long), return_exceptions=True)
    assert isinstance(refused, UserError)
    assert isinstance(fine, Response) and len(fine.tokens) == 12


async def abort_gives_what_there_is(subject: EngineUnderTest) -> None:
    engine, (request, short, *_) = subject.make(), requests(subject, 2)
    endless = drawn(request, max_tokens=subject.long)
    free = await engine.submit(endless)
    beside = asyncio.ensure_future(engine.submit(short))
    # On a busy machine a row may end before it is aborted.
    for _ in range(100):
        task = await under_way(engine, endless)
        with contextlib.suppress(KeyError):
            await engine.abort(request.uid)
        if (ended := await task).finish_reason is FinishReason.ABORT:
            break
    assert ended.finish_reason is FinishReason.ABORT
    assert len(ended.tokens) == len(ended.log_probs) == len(ended.versions) < subject.long
    assert ended.tokens.tolist() == free.tokens[: len(ended.tokens)].tolist()
    assert len((await beside).tokens) == 12
    assert engine.load().rows == 0
    try:
        await engine.abort(request.uid)
    except KeyError:
        return
    raise AssertionError("a row that is not under way was aborted")


async def new_weights_draw_the_tokens_after_them(subject: EngineUnderTest) -> None:
    (request, *_) = requests(subject, 1, tokens=subject.long)
    engine = subject.make()
    old, resuming = await engine.submit(request), ResumingEngine(engine)
    task = await under_way(engine, request, resuming)
    update = asyncio.ensure_future(resuming.update_weights(3, subject.other_weights()))
    # On a busy machine a row may end before the weights arrive; only a row that they reach is checked.
    for _ in range(100):
        if (both := await task).versions[-1] == 3:
            break
        task = asyncio.ensure_future(resuming.submit(request))
    await update
    new = await engine.submit(request)
    assert set(new.versions.tolist()) == {3} and new.tokens.tolist() != old.tokens.tolist()
    before = both.versions.tolist().count(0)
    assert both.versions.tolist() == [0] * before + [3] * (subject.long - before) and before < subject.long
    assert both.tokens[:before].tolist() == old.tokens[:before].tolist()


async def weights_that_lack_a_tensor_are_refused(subject: EngineUnderTest) -> None:
    engine, (request, *_) = subject.make(), requests(subject, 1)
    before, tensors = await engine.submit(request), list(subject.other_weights().tensors())
    lacking: Any = SimpleNamespace(tensors=lambda: tensors[:-1])
    try:
        await engine.update_weights(1, lacking)
    except ValueError:
        after = await engine.submit(request)
        assert after.tokens.tolist() == before.tokens.tolist() and after.versions.tolist() == before.versions.tolist()
        return
    raise AssertionError("weights without one of the model's tensors were taken")


async def an_engine_sleeps_when_idle_and_requests_wait_for_it(subject: EngineUnderTest) -> None:
    engine, (request, short, *_) = subject.make(), requests(subject, 2)
    endless = drawn(request, max_tokens=subject.long)
    # On a busy machine a row may end before the engine is asked to sleep.
    for _ in range(100):
        task = await under_way(engine, endless)
        try:
            await engine.sleep()
        except RuntimeError:
            break
        await engine.wake()
        await task
    else:
        raise AssertionError("the engine slept with a row under way")
    first = await task
    await engine.sleep()
    waiting = asyncio.ensure_future(engine.submit(short))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await engine.wake()
    assert len((await waiting).tokens) == 12 and len(first.tokens) == subject.long


CHECKS: tuple[Callable[[EngineUnderTest], Awaitable[None]], ...] = (
    every_request_is_answered_once_with_what_it_asked_for,
    log_probs_are_those_of_training,
    a_later_turn_has_the_log_probs_of_training,
    a_rows_tokens_depend_on_the_row_alone,
    a_row_goes_on_where_its_earlier_draws_ended,
    stop_tokens_end_a_row_and_belong_to_it,
    a_request_without_room_is_refused_and_harms_no_other,
    abort_gives_what_there_is,
    new_weights_draw_the_tokens_after_them,
    weights_that_lack_a_tensor_are_refused,
    an_engine_sleeps_when_idle_and_requests_wait_for_it,
)
"""All checks.

For an engine whose tokens depend on the batch composition, leave out `a_rows_tokens_depend_on_the_row_alone`.
"""

"""Interrupted rows resume as if they had not been interrupted."""

from __future__ import annotations

import asyncio

import pytest
import torch

from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Response, SamplingParams, joined, remaining_request
from braidrl.engines.stepping import EngineReplica
from tests.engines.tiny import make_model, make_requests, make_tokenizer, response_of, training_log_probs


def test_aborted_and_continued_rows_equal_those_of_an_undisturbed_run() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    requests = make_requests(4, 3, SamplingParams(max_tokens=30, temperature=0.9), shortest=4)
    whole = EmbeddedEngine(model, tokenizer, Decoding(16, 128)).generate(requests)
    engine = EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 128)))

    async def in_two_parts() -> list[Response]:
        tasks = [asyncio.ensure_future(engine.submit(request)) for request in requests]
        while engine.engine.tokens_generated < 12 * 11:
            await asyncio.sleep(0)
        for request, task in zip(requests, tasks, strict=True):
            if not task.done():
                await engine.abort(request.uid)
        first = await asyncio.gather(*tasks)
        await engine.update_weights(1)
        rest = [remaining_request(request, ended) for request, ended in zip(requests, first, strict=True)]
        again = await asyncio.gather(*(engine.submit(request) for request in rest if request is not None))
        by_uid = {row.uid: row for row in again}
        return [joined([ended, by_uid[ended.uid]]) if ended.uid in by_uid else ended for ended in first]

    rows = asyncio.run(in_two_parts())
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in whole]
    assert [row.finish_reason for row in rows] == [row.finish_reason for row in whole]
    assert any(set(row.versions.tolist()) == {0, 1} for row in rows)
    for row, expected in zip(rows, training_log_probs(model, requests, rows), strict=True):
        torch.testing.assert_close(row.log_probs, expected, rtol=0, atol=1e-5)


def test_complete_responses_and_responses_of_other_rows_are_not_continued() -> None:
    request, other = make_requests(1, 2, SamplingParams(max_tokens=3))
    tokens = torch.tensor([1, 2])
    aborted = response_of(request.uid, tokens, FinishReason.ABORT)
    resumed_groups = remaining_request(request, aborted)
    assert resumed_groups is not None
    assert (resumed_groups.first_draw, resumed_groups.sampling.max_tokens, resumed_groups.prompt.tolist()[-2:]) == (
        2,
        1,
        [1, 2],
    )
    stopped = response_of(request.uid, tokens, FinishReason.STOP)
    assert remaining_request(request, stopped) is None
    with pytest.raises(ValueError, match="cannot continue the response"):
        remaining_request(other, aborted)

"""Requests and responses cross between a run and an engine's process unchanged."""

from __future__ import annotations

import asyncio

import pytest
import torch

from braidrl.data.rows import FinishReason
from braidrl.engines.engine import EngineError, Load
from braidrl.engines.engine_process import ERRORS, EngineCall, EngineReply, framed, receive
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.errors import UserError
from tests.engines.tiny import response_of


async def arrived(message: EngineCall | EngineReply) -> list[EngineCall | EngineReply | None]:
    """Return what a reader gets until the writer has ended."""
    reader = asyncio.StreamReader()
    reader.feed_data(framed(message))
    reader.feed_eof()
    return [await receive(reader, type(message)) for _ in range(2)]


def test_a_request_arrives_with_its_prompt_and_sampling() -> None:
    sampling = SamplingParams(0.7, 0.9, 5, 64, (3, 4), ("stop",), greedy=True)
    request = Request((1, 2**40, 3), torch.tensor([5, 6, 7]), sampling, "evaluate", "second", 4, 2)
    call, end = asyncio.run(arrived(EngineCall("submit", 9, request=request, followed=True)))
    assert isinstance(call, EngineCall) and (call.method, call.id, call.followed, end) == ("submit", 9, True, None)
    result = call.request
    assert result is not None and torch.equal(result.prompt, request.prompt) and result.prompt.dtype == torch.int64
    for name in ("uid", "sampling", "purpose", "stage", "first_draw", "continues"):
        assert getattr(result, name) == getattr(request, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_response_arrives_with_the_bits_of_its_log_probs(dtype: torch.dtype) -> None:
    log_probs = torch.tensor([-0.1, -2.5], dtype=dtype)
    sent = response_of((0, 1, 2), torch.tensor([8, 9]), FinishReason.LENGTH, log_probs, torch.tensor([3, 4]))
    sent.per_token["routes"] = torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.uint8)
    reply, _ = asyncio.run(arrived(EngineReply(1, sent, load=Load(4, 1, 0))))
    assert isinstance(reply, EngineReply) and isinstance(reply.result, Response) and reply.load == Load(4, 1, 0)
    result = reply.result
    assert result.uid == sent.uid and result.finish_reason is FinishReason.LENGTH
    assert set(result.per_token) == set(sent.per_token) and torch.equal(result.tokens, sent.tokens)
    for name, values in sent.per_token.items():
        assert torch.equal(result.per_token[name], values) and result.per_token[name].dtype == values.dtype


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (UserError("too long"), UserError("too long")),
        (OSError("gone"), EngineError("OSError: gone")),
        (KeyError("row"), KeyError("row")),
    ],
)
def test_errors_are_raised_again_and_foreign_ones_become_engine_errors(raised: Exception, expected: Exception) -> None:
    reply, _ = asyncio.run(arrived(EngineReply.of(7, raised)))
    assert isinstance(reply, EngineReply) and reply.error is not None
    name, text = reply.error
    assert type(ERRORS[name](text)) is type(expected) and str(ERRORS[name](text)) == str(expected)

"""The draws of a row pass through another engine's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from braidrl.engines.requests import ARGUMENT, Draws, EngineRow, Request, SamplingParams, draw_arguments, parse_draws


def test_another_engine_reads_the_draws_of_a_row() -> None:
    request = Request((0, 3, 1), torch.tensor([5]), SamplingParams(top_k=7, stop=("a",)), first_draw=4)
    assert parse_draws(draw_arguments(EngineRow(request, 8), 9)) == Draws(request.key(9), 4, request.sampling)


@pytest.mark.parametrize(
    "given",
    [None, {}, {ARGUMENT: "x"}, {ARGUMENT: '{"key": 1}'}, {ARGUMENT: 3}, {ARGUMENT: '{"key": 1e9, "first": 0}'}],
)
def test_a_request_of_another_client_is_refused_as_a_wrong_value(given: Any) -> None:
    with pytest.raises(ValueError, match="draws tokens for Braid alone"):
        parse_draws(given)

"""Responses become columns in the order of the rows, not in the order in which they finish."""

from __future__ import annotations

import pytest
import torch

from braidrl.agents.trajectory import response_columns
from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import FinishReason, Rows
from braidrl.engines.requests import Response
from braidrl.flow.signatures import GENERATED
from tests.engines.tiny import response_of


def make_rows(prompts: list[list[int]]) -> Rows:
    count = torch.arange(len(prompts))
    return Rows(
        {
            "source": torch.zeros_like(count),
            "group": count // 2,
            "sample": count % 2,
            "prompt": Ragged.from_rows(prompts, torch.int64),
            "prompt_length": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        }
    )


def response(uid: tuple[int, int, int], tokens: list[int], versions: list[int], reason: FinishReason) -> Response:
    ids = torch.tensor(tokens, dtype=torch.int64)
    return response_of(uid, ids, reason, -ids.float(), torch.tensor(versions, dtype=torch.int64))


def test_columns_hold_prompt_and_response_in_the_order_of_the_rows() -> None:
    rows = make_rows([[1, 2], [1, 2], [3]])
    finished = [
        response((0, 1, 0), [7], [4], FinishReason.STOP),
        response((0, 0, 1), [], [], FinishReason.ABORT),
        response((0, 0, 0), [5, 6], [3, 4], FinishReason.LENGTH),
    ]
    columns = response_columns(rows, finished)
    assert set(columns) == set(GENERATED)
    table = rows.with_columns(columns)
    assert table["tokens"].tolist() == [[1, 2, 5, 6], [1, 2], [3, 7]]
    assert table["action_mask"].tolist() == [[False, False, True, True], [False, False], [False, True]]
    assert table["sequence_lengths"].tolist() == [[4], [2], [2]]
    assert table["rollout_log_probs"].tolist() == [[-5.0, -6.0], [], [-7.0]]
    assert table["rollout_versions"].tolist() == [[3, 4], [], [4]]
    assert table["length"].tolist() == [4, 2, 2]
    assert table["action_tokens"].tolist() == [2, 0, 1]
    assert table["finish_reason"].tolist() == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP]
    assert table["version"].tolist() == [3, 0, 4]


def test_no_rows_give_empty_columns() -> None:
    columns = response_columns(make_rows([]), [])
    assert set(columns) == set(GENERATED) and all(len(column) == 0 for column in columns.values())


def test_a_response_missing_twice_or_of_another_row_is_refused() -> None:
    rows = make_rows([[1], [1]])
    first = response((0, 0, 0), [5], [0], FinishReason.STOP)
    for finished in ([first], [first, first], [first, response((0, 9, 0), [5], [0], FinishReason.STOP)]):
        with pytest.raises(ValueError, match="not the same"):
            response_columns(rows, finished)

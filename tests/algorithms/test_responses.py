"""Given responses are joined to their prompts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.ragged import Ragged, join_response

ids = st.lists(st.integers(0, 99), max_size=5)


@given(st.lists(st.tuples(ids, ids), max_size=5))
def test_a_row_joins_prompt_and_response_and_only_the_response_is_action(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    prompt, response = (Ragged.from_rows([row[i] for row in rows], torch.int64) for i in (0, 1))
    tokens, mask, sequences, length, actions = join_response(prompt, response)
    assert tokens.tolist() == [p + r for p, r in rows]
    assert mask.tolist() == [[False] * len(p) + [True] * len(r) for p, r in rows]
    assert sequences.tolist() == [[len(p) + len(r)] for p, r in rows]
    assert length.tolist() == [len(p) + len(r) for p, r in rows]
    assert actions.tolist() == [len(r) for _, r in rows]
    assert (tokens.values.dtype, mask.values.dtype, sequences.values.dtype) == (torch.int64, torch.bool, torch.int64)

"""Rows that end early go on as if they had not, and only those end that the batch cannot need."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.rows import FinishReason
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.partial import continued, groups_to_abort, joined
from braidrl.rollout.replica import EngineReplica
from braidrl.rollout.requests import Finished, Sampling
from tests.rollout.tiny import make_model, make_requests, make_tokenizer, training_log_probs


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_the_batch_is_the_same_whoever_is_first_and_whatever_is_aborted(
    kept: list[bool], wanted: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(kept))))
    decided: dict[int, bool] = {}
    aborted: set[int] = set()
    for group in order:
        if group in aborted:
            continue
        decided[group] = kept[group]
        ended = groups_to_abort(set(range(len(kept))) - aborted, decided, wanted)
        assert not aborted & set(ended)
        aborted |= set(ended)
    batch = [group for group in sorted(decided) if decided[group]][:wanted]
    assert batch == [group for group, keep in enumerate(kept) if keep][:wanted]
    if len(batch) == wanted:
        assert groups_to_abort(range(len(kept), len(kept) + 3), decided, wanted) == [len(kept) + n for n in range(3)]


def test_a_fast_group_never_takes_the_place_of_a_slow_one_before_it() -> None:
    assert groups_to_abort([0, 1, 2, 3], {1: True, 2: True}, 2) == [], "group 0 may still be kept"
    assert groups_to_abort([0, 1, 2, 3], {0: False, 1: True, 2: True}, 2) == [3]


def test_rows_that_were_aborted_and_continued_are_those_of_an_undisturbed_run() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    requests = make_requests(4, 3, Sampling(max_tokens=30, temperature=0.9), shortest=4)
    whole = EmbeddedEngine(model, tokenizer, 16, 128).generate(requests)
    engine = EngineReplica(EmbeddedEngine(model, tokenizer, 16, 128))

    async def in_two_parts() -> list[Finished]:
        tasks = [asyncio.ensure_future(engine.submit(request)) for request in requests]
        while engine.engine.tokens_generated < 12 * 11:
            await asyncio.sleep(0)
        for request, task in zip(requests, tasks, strict=True):
            if not task.done():
                await engine.abort(request.uid)
        first = await asyncio.gather(*tasks)
        await engine.update_weights(1)
        rest = [continued(request, ended) for request, ended in zip(requests, first, strict=True)]
        again = await asyncio.gather(*(engine.submit(request) for request in rest if request is not None))
        by_uid = {row.uid: row for row in again}
        return [joined(ended, by_uid[ended.uid]) if ended.uid in by_uid else ended for ended in first]

    rows = asyncio.run(in_two_parts())
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in whole]
    assert [row.finish_reason for row in rows] == [row.finish_reason for row in whole]
    assert any(set(row.versions.tolist()) == {0, 1} for row in rows)
    for row, expected in zip(rows, training_log_probs(model, requests, rows), strict=True):
        torch.testing.assert_close(row.log_probs, expected, rtol=0, atol=1e-5)


def test_what_is_complete_or_of_another_row_is_not_continued() -> None:
    request, other = make_requests(1, 2, Sampling(max_tokens=3))
    tokens = torch.tensor([1, 2])
    aborted = Finished(request.uid, tokens, -torch.ones(2), FinishReason.ABORT, torch.zeros(2, dtype=torch.int64))
    going_on = continued(request, aborted)
    assert going_on is not None
    assert (going_on.first_draw, going_on.sampling.max_tokens, going_on.prompt.tolist()[-2:]) == (2, 1, [1, 2])
    stopped = Finished(request.uid, tokens, -torch.ones(2), FinishReason.STOP, torch.zeros(2, dtype=torch.int64))
    assert continued(request, stopped) is None
    with pytest.raises(ValueError, match="cannot go on from"):
        continued(other, aborted)

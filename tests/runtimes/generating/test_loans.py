"""Rows that wait on a loaded rank are drawn by free ranks, with the same tokens, and come back to their rank."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster import rounds
from braidrl.cluster.world import World
from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.flow.recipes import load_flow
from braidrl.runtimes.generating.loans import planned_moves
from braidrl.runtimes.generating.verification import EarlyStop
from tests.engines.tiny import make_model, make_tokenizer
from tests.runtimes.generating.test_early_stop import in_threads

STEP_S = 0.002


class SteadyEngine(EmbeddedEngine):
    """An engine whose steps take the same time on a shared processor as on devices of their own."""

    steps = 0

    def step(self) -> list[Response]:
        time.sleep(STEP_S)
        self.steps += 1
        return super().step()


def make_engine() -> SteadyEngine:
    return SteadyEngine(make_model(), make_tokenizer(), Decoding(16, 200, seed=3, compile=False))


def played(shares: Sequence[Sequence[Request]], lends: bool = True) -> tuple[dict[Uid, list[int]], list[int]]:
    """Return the tokens of all rows, whose ranks are threads, and the steps of each rank's engine."""
    grpo, engines = load_flow("grpo", {}, {"samples_per_prompt": 2}), [make_engine() for _ in shares]

    def play(alone: World) -> dict[Uid, list[int]]:
        mine, tokens = shares[alone.rank], dict[Uid, list[int]]()
        stop = EarlyStop(None, grpo, [request.uid for request in mine], 1, alone, wave=1)
        assert stop.loans is not None
        loans = stop.loans

        def ended(response: Response) -> None:
            assert response.uid not in tokens
            tokens[response.uid] = response.tokens.tolist()
            stop.count(len(response.tokens))

        if lends:
            loans.open(engines[alone.rank], mine, ended)
        engines[alone.rank].generate(mine, lambda row: None if loans.ended(row) else ended(row), stop.changes)
        stop.close()
        assert not loans.world.mail or not any(loans.world.mail.check([key]) for key in loans.written)
        return tokens

    tokens = in_threads(len(shares), play)
    assert [set(part) for part in tokens] == [{request.uid for request in share} for share in shares]
    return {uid: ids for part in tokens for uid, ids in part.items()}, [engine.steps for engine in engines]


def request(row: int, tokens: int) -> Request:
    return Request((0, row, 0), torch.tensor([1 + row % 90, 7]), SamplingParams(max_tokens=tokens, ends=False))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 16)), min_size=1, max_size=9))
def test_moves_fill_free_slots_and_leave_waiting_rows_even(ranks: list[tuple[int, int]]) -> None:
    waiting, free = [rows for rows, _ in ranks], [slots for _, slots in ranks]
    lent, borrowed = Counter[int](), Counter[int]()
    for move in planned_moves(waiting, free):
        lent[move.lender] += move.rows
        borrowed[move.borrower] += move.rows
    assert lent.total() == borrowed.total() == min(sum(waiting), sum(free))
    assert all(lent[rank] <= rows for rank, rows in enumerate(waiting))
    assert all(borrowed[rank] <= slots for rank, slots in enumerate(free))
    left = [rows - lent[rank] for rank, rows in enumerate(waiting)]
    assert all(left[rank] >= max(left) - 1 for rank in range(len(left)) if lent[rank])


def test_waiting_rows_of_loaded_rank_are_drawn_by_free_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_EVERY_S", 0.003)
    rows = [request(row, 30 if row < 48 else 6) for row in range(64)]
    # The third rank has no rows.
    shares = [rows[:48], rows[48:], []]
    tokens, steps = played(shares)
    dealt, before = played(shares, lends=False)
    assert tokens == dealt
    assert before == [90, 6, 0] and max(steps) < 60, f"{before} steps, now {steps}"


@pytest.mark.soak
def test_skewed_load_comes_near_the_ideal_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt in eight has responses ten times as long; 8 ranks have 16 prompts of 8 samples each, and 16 slots."""
    monkeypatch.setattr(rounds, "ROUND_EVERY_S", 0.005)
    chance = random.Random(1)
    long = set(chance.sample(range(128), 16))
    rows = [request(row, 80 if row // 8 in long else 8) for row in range(1024)]
    shares = [rows[128 * rank : 128 * (rank + 1)] for rank in range(8)]
    dealt, before = played(shares, lends=False)
    tokens, steps = played(shares)
    ideal = sum(len(row) for row in tokens.values()) / 128
    print(f"steps of each rank as dealt: {before}; with loans: {steps}; ideal: {ideal:.0f}")
    # A rank that takes a row whenever a slot is free ends at most one longest row after the ideal (Graham, 1969).
    assert tokens == dealt and max(steps) < ideal + 1.2 * 80 < max(before)

"""A row that ends its processes runs alone, and is then left out; no other row is."""

from __future__ import annotations

import random

import pytest

from braidrl.cluster.row_deaths import DEATHS_OF_ROW, RowDeaths
from braidrl.data.identity import Uid

ROWS: list[Uid] = [(0, number // 2, number % 2) for number in range(12)]


def lost_rank(rows: list[Uid], ranks: int, draw: random.Random, deadly: set[Uid]) -> list[Uid]:
    """Return the rows of a rank that ends with one of the rows of a pass; none if all ranks complete theirs."""
    draw.shuffle(rows)
    shares = [rows[rank::ranks] for rank in range(ranks)]
    return next((share for share in shares if not deadly.isdisjoint(share)), [])


@pytest.mark.parametrize("seed", range(50))
def test_simulated_ranks_leave_out_the_rows_that_end_them_and_no_other(seed: int) -> None:
    draw, deaths, ended = random.Random(seed), RowDeaths(), 0
    deadly, left_out = set(draw.sample(ROWS, draw.randint(0, 4))), list[Uid]()
    while True:
        for positions in deaths.passes(ROWS):
            drawn = [ROWS[position] for position in positions if ROWS[position] not in deaths.left_out]
            if lost := lost_rank(drawn, draw.randint(1, 4), draw, deadly):
                left_out += deaths.record("ranks", lost)
                ended += 1
                break
        else:
            break
    assert deaths.left_out == set(left_out) == deadly and len(left_out) == len(deadly)
    assert ended <= DEATHS_OF_ROW * len(deadly)


def test_rows_of_a_task_that_does_not_isolate_are_counted_and_named() -> None:
    deaths = RowDeaths()
    for _ in range(DEATHS_OF_ROW):
        assert not deaths.record("reference", ROWS[:1], isolates=False)
    assert not deaths.isolates and str(ROWS[0]) in deaths.frequent() and str(ROWS[1]) not in deaths.frequent()


def test_another_process_isolates_the_same_rows_after_a_message() -> None:
    deaths, learned = RowDeaths(), RowDeaths()
    for _ in range(DEATHS_OF_ROW):
        deaths.record("ranks", ROWS[:1])
    deaths.record("ranks", ROWS[1:3])
    deaths.record("ranks", ROWS[2:4])
    suspects, left_out = deaths.isolated()
    learned.learn(([*suspects], [*left_out]))
    assert learned.passes(ROWS) == deaths.passes(ROWS) == [[n for n in range(12) if n != 2], [2]]
    assert learned.left_out == set(ROWS[:1]) and learned.concern(ROWS[:1]) and not learned.concern(ROWS[3:])

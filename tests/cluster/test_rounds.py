"""All ranks get the same totals of each round, and none waits while it works."""

from __future__ import annotations

import threading

import pytest

from braidrl.cluster import rounds
from braidrl.cluster.rounds import NOTHING_LEFT, Rounds
from braidrl.cluster.world import World
from tests.runtimes.generating.test_early_stop import in_threads


def test_ranks_that_leave_at_different_times_get_the_same_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_EVERY_S", 0.0)
    has_worked = threading.Event()

    def work(alone: World) -> tuple[int, int]:
        rounds = Rounds(alone)
        if alone.rank == 2:
            # The other ranks are not there yet.
            assert [rounds.join(number, (1,)) for number in range(5)] == [None] * 5
            has_worked.set()
        has_worked.wait(20)
        while (totals := rounds.leave(NOTHING_LEFT, (10,))) is not None:
            last = totals
        return last.sums[0], last.working

    assert in_threads(3, work) == [(30, 0)] * 3

"""Activity of a run's workers as the user sees it."""

from __future__ import annotations

import pytest

from braidrl.runtimes.streaming.groups import Activity


def test_idle_share_is_worker_time_without_rows() -> None:
    activity = Activity()
    activity.note(10.0, "engine 0", "actor.generate", has_rows=True)
    activity.note(10.0, "engine 1", "actor.generate")
    activity.note(10.0, "trainer", "actor")
    activity.note(12.0, "engine 1", "actor.generate", has_rows=True)
    activity.note(12.0, "trainer", "actor", has_rows=True)
    activity.weight_bytes, activity.drawn_again, activity.left_out = 5, 3, 1
    for worker in ("engine 0", "engine 1", "trainer"):
        activity.note(14.0, worker, None)
    sums = {"streaming/weight_bytes": 5.0, "streaming/rows_drawn_again": 3.0, "streaming/rows_left_out": 1.0}
    assert activity.take_sums() == pytest.approx(
        {"streaming/idle/actor.generate": 0.25, "streaming/idle/actor": 0.5, **sums}
    )
    activity.advance(20.0)
    assert activity.take_sums() == dict.fromkeys(sums, 0.0), "no worker was there"

"""Activity of a run's workers as the user sees it."""

from __future__ import annotations

import pytest

from braidrl.runtimes.streaming.groups import Activity


def test_idle_share_is_worker_time_without_rows() -> None:
    activity = Activity()
    activity.note(10.0, [("actor.generate", True), ("actor.generate", False), ("actor", False)])
    activity.note(12.0, [("actor.generate", True), ("actor.generate", True), ("actor", True)])
    activity.weight_bytes, activity.drawn_again, activity.left_out = 5, 3, 1
    activity.note(14.0, [])
    sums = {"streaming/weight_bytes": 5.0, "streaming/rows_drawn_again": 3.0, "streaming/rows_left_out": 1.0}
    assert activity.take_sums() == pytest.approx(
        {"streaming/idle/actor.generate": 0.25, "streaming/idle/actor": 0.5, **sums}
    )
    activity.note(20.0, [])
    assert activity.take_sums() == dict.fromkeys(sums, 0.0), "no worker was there"

"""Workers' reports in the metrics of the run."""

from __future__ import annotations

import pytest

from braidrl.flow import Flow, actor, reference, reward
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.program import stage_seconds


def test_stage_seconds_count_ranks_of_one_lease_once() -> None:
    flow = Flow("timed", [actor.generate(), reward.verify(), reference.log_probs()])
    groups = [
        Group("actor.generate", "generate", "actor", ("actor.generate",), 2),
        Group("reference", "model", "reference", ("reference.log_probs",), 2, divided=True),
    ]
    reports = [
        {"stage": stage, "seconds": seconds, "sums": {}}
        for stage, seconds in (("actor.generate", 3.0), ("actor.generate", 1.0), ("reference.log_probs", 0.5))
    ]
    assert stage_seconds(flow, groups, reports) == pytest.approx(
        {"actor.generate": 2.0, "reward.verify": 0.0, "reference.log_probs": 0.5}
    )

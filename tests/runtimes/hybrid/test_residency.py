"""Roles of one pool take turns in memory, and the result is that of one process with room for all."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.runtimes.memory.residency import GIB
from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.test_layouts import PPO
from tests.tiny import Workshop

MODEL_BYTES = 8 * 17_000
"""About the size of the tiny Qwen3's weights in float64."""


@pytest.mark.soak
def test_roles_of_a_pool_leave_for_each_other(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    sections = {**PPO, "data": {"max_prompt_tokens": 12}}

    def tight(models: float) -> dict[str, Any]:
        trainer = {**PPO["trainer"], "resident_gib": models * MODEL_BYTES / GIB}
        return {**sections, "trainer": trainer, "runtime": "hybrid", "placement": "colocate", "workers": 2}

    with pytest.raises(UserError, match=r"needs .*bytes on a device"):
        TrainingRun(workshop.config("refused", **tight(0.5)))
    assert_same(trace(workshop.run("tight", **tight(6.0))), trace(workshop.run("alone", **sections)))

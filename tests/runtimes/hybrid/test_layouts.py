"""Layouts over a pool's processes give the result of one process, wherever roles are placed and however they are
sharded.
"""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.observe.trace import read_trace
from braidrl.runtimes.memory.residency import GIB
from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.test_layouts import FLOW, PPO, RECOMPUTED, REPLICA, SELECTED
from tests.tiny import Workshop

LAYOUTS = {"trainer": {"layout": {"shard": "full"}}, "roles": {"critic": {"layout": {"pipeline": 2}}}}


def hybrid(workshop: Workshop, name: str, sections: dict[str, Any], placement: str, **more: Any) -> Any:
    trainer = {**sections["trainer"], **more.pop("trainer", {})}
    return workshop.config(
        name, **{**sections, **more, "trainer": trainer}, runtime="hybrid", placement=placement, workers=2
    )


@pytest.mark.soak
def test_sharded_pools_equal_single_process(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    """Use fewer rows than ranks in an update, so that some ranks infer and train without rows."""
    with TrainingRun(hybrid(workshop, "ppo", PPO, "split", **LAYOUTS)) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **PPO)))
    assert (run.folder / "checkpoints/step-1/actor/optimizer.safetensors").is_file()


def test_pool_reshards_weights_for_inference_and_frees_them(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    """The ranks also decode together.

    The budget is five and a half models in float64; actor, critic and their optimizers need more.
    """
    sections = {**RECOMPUTED, "data": {"max_prompt_tokens": 12}}
    trainer = {"inference_layout": {"tensor": 2}, "resident_gib": 5.5 * 8 * 17_000 / GIB}
    roles = {"critic": {"layout": {"shard": "full"}, "inference_layout": {"data": 2}}}
    rollout = {**sections["rollout"], "tensor": 2}
    with TrainingRun(
        hybrid(workshop, "copies", sections, "colocate", trainer=trainer, roles=roles, rollout=rollout)
    ) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **sections)))


@pytest.mark.soak
def test_roles_of_one_pool_may_have_different_layouts(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    with TrainingRun(hybrid(workshop, "mixed", FLOW, "colocate", roles=REPLICA)) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **FLOW)))


@pytest.mark.soak
def test_joint_decoding_selects_same_rows_as_single_process(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    """Some waves have fewer groups than there are ranks."""
    rollout = {**SELECTED["rollout"], "tensor": 2}
    with TrainingRun(hybrid(workshop, "selected", SELECTED, "colocate", rollout=rollout)) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **SELECTED)))
    driven = {span.stage for span in read_trace(run.folder) if span.worker == "controller"}
    assert driven >= {"select.informative_groups", "advantage.group_normalized"}

"""Layouts over the processes of a pool: the run is that of one process, wherever roles live and whatever they divide."""

from __future__ import annotations

from typing import Any

from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.test_layouts import FLOW, PPO, REPLICA
from tests.tiny import Workshop

LAYOUTS = {"trainer": {"layout": {"shard": "full"}}, "roles": {"critic": {"layout": {"pipeline": 2}}}}


def hybrid(workshop: Workshop, name: str, sections: dict[str, Any], placement: str, **more: Any) -> Any:
    trainer = {**sections["trainer"], **more.pop("trainer", {})}
    return workshop.config(
        name, **{**sections, **more, "trainer": trainer}, runtime="hybrid", placement=placement, workers=2
    )


def test_ranks_of_pools_divide_their_models_and_the_run_is_that_of_one_process(
    workshop: Workshop, warm_cluster: WarmCluster
) -> None:
    """With fewer rows than ranks in an update, so that some infer and train without any."""
    with TrainingRun(hybrid(workshop, "ppo", PPO, "split", **LAYOUTS)) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **PPO)))
    assert len(list((run.folder / "checkpoints/step-1/actor/optimizer").glob("*.distcp"))) == 2


def test_roles_of_one_pool_lie_in_it_in_different_ways(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    with TrainingRun(hybrid(workshop, "mixed", FLOW, "colocate", roles=REPLICA)) as run:
        run.train()
    assert_same(trace(run.folder), trace(workshop.run("alone", **FLOW)))

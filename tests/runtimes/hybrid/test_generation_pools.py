"""A role that trains in one pool and generates in another gives the result of one process, for any pool sizes."""

from __future__ import annotations

from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.hybrid.group import check_devices_alike
from braidrl.runtimes.prepare.setup import prepare
from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.test_layouts import PPO
from tests.tiny import Workshop

GRPO: dict[str, Any] = {
    "flow": "grpo",
    "dtype": "float64",
    "trainer": {
        "prompts_per_step": 4,
        "rows_per_update": 8,
        "learning_rate": 3e-3,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
    },
}


def pools(*sizes: tuple[str, int]) -> dict[str, Any]:
    """Return the sections of a hybrid run with this many processes for each list of roles."""
    return {"runtime": "hybrid", "placement": {"pools": [{"roles": r.split(), "workers": n} for r, n in sizes]}}


def trained(workshop: Workshop, name: str, sections: dict[str, Any], **more: Any) -> Any:
    with TrainingRun(workshop.config(name, **{**sections, **more})) as run:
        run.train()
    return trace(run.folder)


@pytest.mark.parametrize(
    ("sections", "placed", "more"),
    [
        pytest.param(GRPO, pools(("actor.generate", 2), ("actor reference", 1)), {}, marks=pytest.mark.soak),
        pytest.param(
            PPO,
            pools(("actor", 2), ("critic reference", 1), ("actor.generate", 1)),
            {"roles": {"actor": {"layout": {"shard": "full"}}}},
            marks=pytest.mark.soak,
        ),
        (GRPO, pools(("actor.generate", 2), ("actor reference", 1)), {"rollout": {"tensor": 2}}),
        pytest.param(
            GRPO,
            pools(("actor.generate", 1), ("actor reference", 2)),
            {"rollout": {"engines": 1}},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["two engines", "sharded trainer", "engine of two ranks", "engine process"],
)
def test_generation_in_a_separate_pool_gives_the_same_result(
    workshop: Workshop,
    warm_cluster: WarmCluster,
    sections: dict[str, Any],
    placed: dict[str, Any],
    more: dict[str, Any],
) -> None:
    for name, section in more.items():
        sections = {**sections, name: {**sections.get(name, {}), **section}}
    metrics = trained(workshop, "apart", sections, **placed)
    alone = {name: value for name, value in sections.items() if name != "roles"}
    alone["rollout"] = {k: v for k, v in sections.get("rollout", {}).items() if k not in ("tensor", "engines")}
    assert_same(metrics, trained(workshop, "alone", alone))
    # Engine processes read files that the training ranks have written on this machine.
    received = [line.get("weights/actor/received", 0) for line in read_metrics(workshop.folder / "apart")[1:]]
    assert all((size > 0) is ("engines" not in sections.get("rollout", {})) for size in received)


@pytest.mark.soak
def test_resume_loads_checkpoint_weights_in_both_pools(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    placed = pools(("actor.generate", 1), ("actor reference", 1))
    trained(workshop, "run", {**GRPO, "trainer": {**GRPO["trainer"], "steps": 1}}, **placed)
    with TrainingRun(workshop.config("resumed", **GRPO, **placed), resume=workshop.folder / "run") as run:
        run.train()
    assert_same(trace(workshop.folder / "run"), trained(workshop, "alone", GRPO))


def refused(workshop: Workshop, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare(workshop.config("refused", **sections))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pools_between_which_weights_cannot_go_are_refused(workshop: Workshop) -> None:
    apart = {**GRPO, **pools(("actor.generate", 1), ("actor reference", 1))}
    backend = "examples/plugins/backend.py:PlainBackend"
    assert "cannot send weights to another pool" in refused(workshop, **apart, roles={"actor": {"backend": backend}})
    assert "rollout.grouping is for ranks that train" in refused(workshop, **apart, rollout={"grouping": "neighbour"})


def test_pools_with_devices_of_different_kinds_are_refused() -> None:
    check_devices_alike("actor", "cuda", "cuda")
    with pytest.raises(UserError, match=r"actor trains on cuda .*cpu; give"):
        check_devices_alike("actor", "cuda", "cpu")

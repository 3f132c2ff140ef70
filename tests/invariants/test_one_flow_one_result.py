"""Invariant 1: the same flow, seed and data give the same tokens, advantages, gradient norms and weights under every
runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import read_texts, rollout_path
from braidrl.runtimes.run import TrainingRun
from tests.cases import soak_but
from tests.invariants.traces import EVERY_STEP, Step, assert_same, assert_same_weights, merged, run, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.runtimes.turns import PLAYED
from tests.tiny import ROOT, Workshop

FLOWS: dict[str, dict[str, Any]] = {
    "grpo": {
        "flow": "grpo",
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "epochs": 2, "learning_rate": 3e-3},
    },
    "ppo": {
        "flow": "ppo",
        "algorithm": {"reward": "verify", "whiten": True, "kl_target": 0.5},
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "epochs": 2, "learning_rate": 3e-3},
    },
    "episodes": {
        "flow": str(ROOT / "tests" / "runtimes" / "turn_credit.yaml"),
        "rollout": {"max_response_tokens": 4, "environment": PLAYED},
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    },
    "diamond": {
        "flow": str(ROOT / "tests" / "runtimes" / "diamond.yaml"),
        "data": {"curriculum": {"name": "gaussian", "params": {"least": 0.1}}},
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    },
    "following": {
        "flow": str(ROOT / "tests" / "runtimes" / "following.yaml"),
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    },
    "two actors": {
        "flow": str(ROOT / "tests" / "runtimes" / "two_actors.yaml"),
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    },
    "two policies": {
        "flow": str(ROOT / "tests" / "runtimes" / "two_policies.yaml"),
        "rollout": {"max_response_tokens": 4},
        "trainer": {"prompts_per_step": 4, "rows_per_update": 8, "learning_rate": 3e-3},
    },
    "dapo with refills": {
        "flow": "dapo",
        "data": {"curriculum": "bands"},
        "algorithm": {"overlong_cache": 2},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"prompts_per_step": 4, "learning_rate": 3e-3},
    },
    "dapo with more than it needs": {
        "flow": "dapo",
        "algorithm": {"overlong_cache": 2},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"prompts_per_step": 4, "learning_rate": 3e-3, "over_sampling": 4.0},
    },
    "dapo with surplus": {
        "flow": "dapo",
        "algorithm": {"overlong_cache": 2},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"prompts_per_step": 4, "learning_rate": 3e-3, "surplus": "keep", "max_staleness": 1},
    },
}
SOON = ("ppo", "episodes", "two actors", "dapo with refills")
"""Flows that `make test` runs on a driver and in a stream, and all of two ranks; the others are soak tests."""
PLACEMENTS = ("colocate", "standalone", "split")
WORKERS = (1, 2, 4)
# Every flow (episodes: with two policies), placement and number of workers; under ranks that with more than it needs.
FEW = [
    ("grpo", "colocate", 2),
    ("ppo", "split", 2),
    ("diamond", "standalone", 1),
    ("following", "colocate", 2),
    ("two actors", "standalone", 1),
    ("two policies", "split", 2),
    ("dapo with refills", "colocate", 4),
    ("dapo with surplus", "colocate", 2),
]
# A role that takes its weights from another role lives in the same pool, as do those that play together.
EVERYTHING = [
    (flow, placement, workers)
    for flow, placement, workers in itertools.product(FLOWS, PLACEMENTS, WORKERS)
    if (flow != "following" or placement == "colocate") and (flow, placement) != ("two policies", "standalone")
]

# The ranks, the number of them that generate, and the flows that they run one after the other.
WORLDS: list[tuple[int, list[str]]] = [
    (2, ["grpo", "diamond", "dapo with surplus", "following", "two actors", "two policies"]),
    (4, ["ppo", "dapo with refills", "dapo with more than it needs"]),
]

STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"weights": "delayed"}),
    ("ppo", {"workers": {"critic": 2}}),
    ("diamond", {"dispatch_rows": 1}),
    ("two policies", {"workers": {"actor.generate": 2}}),
    ("dapo with refills", {"workers": {"actor.generate": 2, "actor": 2}, "dispatch_rows": 3}),
]
"""Flows under streaming with staleness 0, and settings that must not matter."""

Reference = Callable[[str], list[Step]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Reference:
    """Return the eager runtime's result for each flow; each runs once."""
    known: dict[str, list[Step]] = {}

    def steps(flow: str) -> list[Step]:
        if flow not in known:
            shop = Workshop(tmp_path_factory.mktemp("eager"), tiny_models["qwen3"], sums_file)
            known[flow] = run(shop, "eager", **FLOWS[flow])
        return known[flow]

    return steps


@pytest.mark.parametrize(
    ("flow", "placement", "workers"),
    soak_but([("ppo", "split", 2), ("two actors", "standalone", 1)], FEW),
)
def test_hybrid_gives_the_result_of_eager(
    workshop: Workshop, reference: Reference, warm_cluster: WarmCluster, flow: str, placement: str, workers: int
) -> None:
    ours = run(workshop, "hybrid", **FLOWS[flow], runtime="hybrid", placement=placement, workers=workers)
    assert_same(ours, reference(flow))


@pytest.mark.soak
def test_hybrid_evaluates_and_replays_as_eager_does(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    settings = {
        "flow": "grpo",
        "data": {"train": str(workshop.data), "eval": {"held_out": str(workshop.data)}},
        "evaluation": {"every": 2, "samples": 2, "max_prompts": 4, "before_first_step": False},
        "trainer": {"steps": 2},
    }
    theirs, hybrid = run(workshop, "eager", **settings), {"runtime": "hybrid", "workers": 2}
    assert "eval/held_out/avg@2" in theirs[-1].metrics
    assert_same(run(workshop, "hybrid", **settings, **hybrid), theirs)
    replayed = workshop.run("replayed", replay=workshop.folder / "eager", **merged(EVERY_STEP, {**settings, **hybrid}))
    assert_same_weights(trace(replayed)[-1].weights, theirs[-1].weights)
    prompts = {name: read_texts(rollout_path(workshop.folder / name, 2, "held_out")) for name in ("eager", "hybrid")}
    assert prompts["eager"] == prompts["hybrid"] and len(prompts["eager"]) == 8


@pytest.mark.parametrize("runtime", ["hybrid", "eager"])
def test_hybrid_run_resumes_exactly_under_either_runtime(
    workshop: Workshop, reference: Reference, warm_cluster: WarmCluster, runtime: str
) -> None:
    flow = FLOWS["dapo with surplus"]
    stopped = {**flow["trainer"], "steps": 3}
    run(workshop, "run", **{**flow, "trainer": stopped}, runtime="hybrid", workers=2)
    whole = {**flow, "trainer": {**EVERY_STEP["trainer"], **flow["trainer"]}}
    config = workshop.config("resumed", **whole, dtype="float64", runtime=runtime, workers=2)
    with TrainingRun(config, resume=workshop.folder / "run") as resumed:
        resumed.train()
    assert_same(trace(workshop.folder / "run"), reference("dapo with surplus"))


@pytest.mark.soak
@pytest.mark.parametrize(("flow", "placement", "workers"), EVERYTHING)
def test_hybrid_gives_the_result_of_eager_in_every_placement(
    workshop: Workshop, reference: Reference, warm_cluster: WarmCluster, flow: str, placement: str, workers: int
) -> None:
    test_hybrid_gives_the_result_of_eager(workshop, reference, warm_cluster, flow, placement, workers)


@pytest.mark.parametrize(("ranks", "flows"), [WORLDS[0], pytest.param(*WORLDS[1], marks=pytest.mark.soak)])
def test_ranks_give_the_result_of_eager(workshop: Workshop, reference: Reference, ranks: int, flows: list[str]) -> None:
    """Run all flows of a world on the same processes."""
    trees = [
        workshop.tree(f"flow-{number}", **merged(EVERY_STEP, FLOWS[flow]), runtime="distributed", workers=ranks)
        for number, flow in enumerate(flows)
    ]
    run_in_ranks(trees, ranks)
    for number, flow in enumerate(flows):
        assert_same(trace(workshop.folder / f"flow-{number}"), reference(flow))


@pytest.mark.parametrize(
    ("flow", "streaming"),
    soak_but([case for case in STREAMED if case[0] in SOON], STREAMED),
)
def test_streaming_without_staleness_gives_the_result_of_eager(
    workshop: Workshop, reference: Reference, flow: str, streaming: dict[str, Any]
) -> None:
    ours = run(workshop, "streaming", **FLOWS[flow], runtime="streaming", streaming=streaming)
    # It counts waits and versions besides.
    known = reference(flow)[0].metrics.keys()
    ours = [replace(step, metrics={n: v for n, v in step.metrics.items() if n in known}) for step in ours]
    assert_same(ours, reference(flow))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_give_the_result_of_eager_for_every_flow(workshop: Workshop, reference: Reference, ranks: int) -> None:
    test_ranks_give_the_result_of_eager(workshop, reference, ranks, list(FLOWS))


def test_the_test_flows_contain_refills_surplus_and_drops(reference: Reference) -> None:
    generated = [step.metrics["rows/generated"] for step in reference("dapo with refills")]
    assert max(generated) > 8, "no batch needed a refill"
    surplus = [step.metrics["staleness/max"] for step in reference("dapo with surplus")]
    assert max(surplus) == 1, "no surplus was trained on"
    assert all(step.metrics["actor/grad_norm"] > 0 for step in reference("grpo"))


def test_an_actor_of_another_name_trains_as_the_actor_does(workshop: Workshop) -> None:
    runs = []
    for role in ("actor", "student"):
        flow = workshop.folder / f"{role}-flow.yaml"
        stages = [
            {"role": role, "type": "generate", "id": "generate"},
            {"role": "reward", "type": "verify"},
            {"type": "advantage.group_centered"},
            {"role": role, "type": "update", "params": {"loss": "clip"}},
        ]
        flow.write_text(yaml.safe_dump({"flow": "named", "stages": stages}))
        runs.append(workshop.run(role, flow=str(flow), trainer={"rows_per_update": 8, "steps": 1}))
    norms = [read_metrics(run)[0][f"{role}/grad_norm"] for role, run in zip(("actor", "student"), runs, strict=True)]
    assert norms[0] == norms[1] > 0

"""`braid eval` under hybrid starts only the generating role, whatever the placement names."""

from __future__ import annotations

from braidrl.runtimes.evaluation import evaluate_model
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop


def test_generating_pool_evaluates_as_eager_does(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    settings = {
        "flow": "grpo",
        "data": {"train": str(workshop.data), "eval": {"held_out": str(workshop.data)}},
        "evaluation": {"samples": 2, "max_prompts": 4},
        "dtype": "float64",
    }
    placement = [["actor"], ["reference"]]
    hybrid = workshop.config("hybrid", **settings, runtime="hybrid", placement=placement, workers=2)
    assert evaluate_model(hybrid) == evaluate_model(workshop.config("eager", **settings))

"""Runs that several ranks make together: one start of processes for many runs, and what the tests compare of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.processes import run_ranks
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.observe.metrics import read_metrics
from braidrl.observe.rollouts import recorded_steps
from braidrl.runtimes.distributed import DistributedCrew
from braidrl.runtimes.run import TrainingRun
from tests.runtimes.turns import PLAYED
from tests.tiny import Workshop, recorded, weights_of

WAIT_S = 60.0
DIAMOND = str(Path(__file__).parent / "diamond.yaml")
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kl_coef": 0.1}, "trainer": {"rows_per_update": 8, "epochs": 2}},
    "dapo": {"flow": "dapo", "algorithm": {"overlong_cache": 4}, "trainer": {"rows_per_update": 8}},
    "episodes": {
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, "slots": 16, "environment": PLAYED},
        "algorithm": {"kl_coef": 0.1},
        "trainer": {"rows_per_update": 8},
    },
    "diamond": {"flow": DIAMOND, "roles": {"reference": {"model": "REFERENCE"}}},
}


def run_all(world: World, task: dict[str, Any]) -> list[list[dict[str, int]]]:
    """On a rank: trains one configuration after the other; rows that came to each rank through the buffer, and their bytes."""
    counts = []
    for tree in task["runs"]:
        before = world.received.exchanged
        with TrainingRun(parse_config(tree), world=world) as run:
            run.train()
            assert isinstance(run.crew, DistributedCrew)
            count = {"moved_rows": run.crew.buffer.moved_rows, "bytes": world.received.exchanged - before}
            counts.append([json.loads(bytes(c)) for c in world.gather("counts", json.dumps(count).encode())])
    return counts


def run_in_ranks(trees: Sequence[dict[str, Any]], workers: int) -> list[list[dict[str, int]]]:
    """Trains every configuration on the same processes; the counts of each, rank by rank."""
    counts: list[list[dict[str, int]]] = run_ranks(
        "tests.runtimes.ranks:run_all", {"runs": list(trees)}, workers, WAIT_S
    )
    return counts


def tree_of(workshop: Workshop, case: str, name: str, reference: Path, **more: Any) -> dict[str, Any]:
    """A configuration in float64, five steps long."""
    sections = dict(CASES[case])
    if "roles" in sections:
        sections["roles"] = {"reference": {"model": str(reference)}}
    sections["roles"] = {**sections.get("roles", {}), **more.pop("roles", {})}
    trainer = {"steps": 5, "max_tokens_per_device": 64, **sections.pop("trainer", {}), **more.pop("trainer", {})}
    return workshop.tree(name, **{"dtype": "float64", "trainer": trainer, **sections, **more})


def assert_same_run(one: Path, other: Path, tolerance: float = 1e-7) -> None:
    """Tokens are identical; advantages, gradient norms and weights agree."""
    assert recorded_steps(one) == recorded_steps(other) != []
    for step in recorded_steps(one):
        left, right = recorded(one, step).ordered(), recorded(other, step).ordered()
        assert left.uids() == right.uids() and set(left) == set(right)
        for name in left:
            column, twin = left[name], right[name]
            if isinstance(column, Ragged):
                assert column.offsets.tolist() == twin.offsets.tolist(), name
                column, twin = column.values, twin.values
            if isinstance(column, torch.Tensor):
                exact = name in ("tokens", "action_mask", "score", "correct", "length")
                torch.testing.assert_close(
                    column, twin, rtol=0, atol=0 if exact else tolerance, msg=f"{name}, step {step}"
                )
            else:
                assert column.values == twin.values
    for line, twin in zip(read_metrics(one), read_metrics(other), strict=True):
        assert set(line) == set(twin)
        for name, value in line.items():
            if not name.startswith(("time/", "throughput/")):
                same = value == twin[name] or abs(value - twin[name]) <= tolerance
                assert same, f"{name} of step {line['step']}: {value} and {twin[name]}"
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weight, weights_of(other)[name], rtol=0, atol=tolerance, msg=name)

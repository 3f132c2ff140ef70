"""Traces of a run, read from its folder, in the same form for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.observe.metrics import MEASURED, read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from tests.tiny import Workshop

EVERY_STEP = {"dtype": "float64", "trainer": {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 4}}
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Step:
    """A step's trace: identities and tokens of its rows in order, the advantages, metrics, and the weights after it."""

    uids: list[tuple[int, int, int]]
    tokens: list[list[int]]
    advantages: Tensor
    metrics: dict[str, Any]
    weights: dict[str, Tensor]


def run(workshop: Workshop, name: str, **sections: Any) -> list[Step]:
    """Train in float64 under the runtime that `sections` names, and return the trace of each step."""
    return trace(workshop.run(name, **merged(EVERY_STEP, sections)))


def assert_usage_is_told(lines: list[dict[str, Any]]) -> None:
    """Make every runtime report its devices' work with fixed rates."""
    for line in lines:
        shares = {name: value for name, value in line.items() if name.startswith("utilisation/")}
        stages = {name.split("/")[2] for name in shares}
        assert "utilisation/operations/actor.update" in shares
        assert not line["time/actor.generate"] or "utilisation/bandwidth/actor.generate" in shares
        assert all(0 < share < 1 for share in shares.values()), shares
        assert all(line[f"memory/{stage}/resident_max"] > 1 << 20 for stage in stages)
    assert any(line.get("weights/actor/update_seconds") for line in lines) or len(lines) == 1


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections of a configuration; the second overrides the first."""
    result = dict(one)
    for name, value in other.items():
        result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return result


def trace(folder: Path) -> list[Step]:
    steps, lines = [], read_metrics(folder)
    assert_usage_is_told(lines)
    for line in lines:
        rows = read_rollouts(rollout_path(folder, line["step"])).ordered()
        advantages = next(rows[n] for n in ("advantages", "turn_advantages", "advantage") if n in rows)
        steps.append(
            Step(
                rows.uids(),
                [row.tolist() for row in (rows["tokens"][i] for i in range(len(rows)))],
                advantages.values if isinstance(advantages, Ragged) else advantages,
                {name: value for name, value in line.items() if not name.startswith(MEASURED)},
                weights(folder / "checkpoints" / f"step-{line['step']}"),
            )
        )
    return steps


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the weights of all trained roles."""
    tensors = {}
    for file in sorted(checkpoint.glob("*/model.safetensors")):
        tensors |= {f"{file.parent.name}.{name}": tensor for name, tensor in load_file(file).items()}
    return tensors


def assert_same(ours: list[Step], theirs: list[Step]) -> None:
    """Assert identical tokens, and advantages, metrics (including gradient norms) and weights equal to 1e-7."""
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        assert our.uids == their.uids
        assert our.tokens == their.tokens
        torch.testing.assert_close(our.advantages, their.advantages, atol=TOLERANCE, rtol=0)
        assert our.metrics.keys() == their.metrics.keys()
        for name, value in our.metrics.items():
            other = their.metrics[name]
            assert (value is None) == (other is None), name
            assert value is None or abs(value - other) <= TOLERANCE, f"{name}: {value} and {other}"
        assert_same_weights(our.weights, their.weights)


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert equality to 1e-7."""
    assert ours.keys() == theirs.keys() != set()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=TOLERANCE, rtol=0)

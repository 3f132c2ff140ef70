"""The comparison of two versions' results finds every difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.tiny import ROOT, load_module

same = load_module(ROOT / "tools" / "same.py")


def a_run(folder: Path, loss: float = 0.5, weight: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return the results of a two-step run with these numbers in its last step, read from its folder."""
    checkpoint = folder / "checkpoints" / "step-2" / "actor"
    checkpoint.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 1, "loss/actor": 0.25}, {"step": 2, "loss/actor": loss, **more}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "checkpoints" / "latest").write_text("step-2\n")
    save_file({"head": np.array([0.0, weight])}, checkpoint / "model.safetensors")
    return same.results(folder)


def test_runs_that_differ_in_times_alone_are_equal(tmp_path: Path) -> None:
    fast = a_run(
        tmp_path / "fast",
        **{"time/step": 1.0, "memory/actor.update/resident_max": 7, "throughput/tokens_per_second": 9.0},
    )
    slow = a_run(tmp_path / "slow", **{"time/step": 2.0, "throughput/tokens_per_second": 5.0})
    assert same.difference(fast, slow) is None


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"loss": 0.5000000000000001}, "loss/actor of step 2: 0.5 before, 0.5000000000000001 after"),
        ({"weight": 1.0000000000000002}, "head of actor/model.safetensors: 1.0 before, 1.0000000000000002 after"),
        ({"reward/mean": None}, "reward/mean of step 2: nothing before, None after"),
    ],
)
def test_a_planted_difference_in_the_last_bit_is_found_and_named(
    tmp_path: Path, changed: dict[str, Any], found: str
) -> None:
    assert same.difference(a_run(tmp_path / "before"), a_run(tmp_path / "after", **changed)) == found


@pytest.mark.parametrize(
    ("before", "after"),
    [(np.zeros(2), -np.zeros(2)), (np.zeros(2), np.zeros((1, 2))), (np.zeros(2), np.zeros(2, np.float32)), (0.0, -0.0)],
)
def test_signs_of_zero_shapes_and_types_count(before: Any, after: Any) -> None:
    assert same.difference({"it": before}, {"it": after}) is not None


def test_equal_bits_are_equal_even_for_nan() -> None:
    assert same.difference({"it": np.array([np.nan])}, {"it": np.array([np.nan])}) is None

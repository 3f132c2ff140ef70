"""Ranks that are lost and come back: undisturbed results, whatever is lost when."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak.chaos import change
from tests.tiny import (
    Workshop,
    braid,
    metrics_agree,
    recorded,
    sums,
    wait_for_steps,
    weights_of,
    write_jsonl,
    write_model,
)

LOSSES, EVERY = 5, 3
"""Losses or arrivals of a run, 20 in all, and the steps between two of them."""
RANKS: dict[str, Any] = {"runtime": "distributed", "workers": 3}
WORKERS: dict[str, Any] = {"runtime": "streaming", "streaming": {"workers": {"actor.generate": 2, "actor": 3}}}
SHARDS: dict[str, Any] = {"trainer": {"layout": {"shard": "full"}}}
CASES: dict[str, dict[str, Any]] = {
    "replicas": RANKS,
    "shards": {**RANKS, **SHARDS},
    "workers": WORKERS,
    "shards-of-workers": {**WORKERS, **SHARDS},
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("regrouping")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(24)))


@pytest.fixture(scope="module")
def quiet(workshop: Workshop) -> Path:
    return workshop.run("quiet", dtype="float64", trackers=[], trainer=trainer_of({}))


def trainer_of(case: dict[str, Any]) -> dict[str, Any]:
    steps = EVERY * (LOSSES + 2)
    return {"steps": steps, "checkpoint_every": 2, "rows_per_update": 8, **case.get("trainer", {})}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_random_losses_and_arrivals_leave_the_result_as_it_is(workshop: Workshop, quiet: Path, case: str) -> None:
    draw, settings = random.Random(case), CASES[case]
    trainer = {**trainer_of(settings), "max_restarts": 2 * LOSSES}
    config = workshop.config_file(case, **{**settings, "dtype": "float64", "trackers": [], "trainer": trainer})
    folder, changes = workshop.folder / case, list[str]()
    with braid("train", config, folder=workshop.folder) as process:
        try:
            for number in range(LOSSES):
                wait_for_steps(folder, EVERY * (number + 1), process)
                time.sleep(draw.random() / 2)
                changes.append(change(draw, process, folder))
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    print(case, changes)
    assert process.returncode == 0, said
    killed = sum(one.startswith(("rank", "actor-")) for one in changes)
    # Two may be lost at once.
    assert said.count("the others go on") >= killed - 1 and killed, said
    assert metrics_agree(folder, quiet)
    for step in range(1, trainer["steps"] + 1):
        assert recorded(folder, step).uids() == recorded(quiet, step).uids()
    ours, theirs = weights_of(folder), weights_of(quiet)
    assert all(torch.allclose(tensor, theirs[name], rtol=0, atol=1e-9) for name, tensor in ours.items())

"""Ranks that are lost and come back: undisturbed results, whatever is lost when."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cluster.watchdog import descendants, name_of
from tests.cases import soak_but
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
STEPS = 7
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # The number of ranks, and their layout.
    "optimizer": (3, {"shard": "optimizer"}),
    "nodes": (4, {"shard": "full", "nodes": 2, "data": 4}),
    "halves": (4, {"shard": "full", "nodes": 2}),
    "tensor": (4, {"tensor": 2, "data": 2}),
    "pipeline": (2, {"pipeline": 2, "data": 1}),
}
KILLED = {"distributed": "rank {}", "streaming": "actor-{}"}


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
            _, output = process.communicate(timeout=200)
        finally:
            process.kill()
    print(case, changes)
    assert process.returncode == 0, output
    killed = sum(one.startswith(("rank", "actor-")) for one in changes)
    # Two may be lost at once.
    assert output.count("the others go on") >= killed - 1 and killed, output
    for step in range(1, trainer["steps"] + 1):
        assert recorded(folder, step).uids() == recorded(quiet, step).uids()
    assert_equal(folder, quiet)


@pytest.fixture(scope="module")
def short(workshop: Workshop) -> Path:
    return workshop.run("short", dtype="float64", trackers=[], trainer={"steps": STEPS, "rows_per_update": 8})


def run_that_loses(workshop: Workshop, runtime: str, layout: str, lost: tuple[int, ...], every: int) -> str:
    """Kill ranks of a run after its third step, at once; return what it says."""
    ranks, settings = LAYOUTS[layout]
    trainer = {"steps": STEPS, "rows_per_update": 8, "checkpoint_every": every, "max_restarts": 9, "layout": settings}
    processes = {"workers": ranks} if runtime == "distributed" else {"streaming": {"workers": {"actor": ranks}}}
    name = f"{runtime}-{layout}-{len(lost)}"
    sections: dict[str, Any] = {"dtype": "float64", "trackers": [], "trainer": trainer, **processes}
    config = workshop.config_file(name, **sections, runtime=runtime)
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(workshop.folder / name, 3, process)
            names = [KILLED[runtime].format(rank) for rank in lost]
            for victim in [pid for pid in descendants(process.pid) if name_of(pid) in names]:
                os.kill(victim, signal.SIGKILL)
            _, output = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return output


def assert_equal(folder: Path, quiet: Path) -> None:
    """Assert that two runs have the same metrics and weights."""
    assert metrics_agree(folder, quiet)
    ours, theirs = weights_of(folder), weights_of(quiet)
    assert all(torch.allclose(tensor, theirs[name], rtol=0, atol=1e-9) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "case",
    soak_but(
        ["distributed-optimizer"],
        [f"{runtime}-{layout}" for runtime in KILLED for layout in LAYOUTS if layout != "halves"],
    ),
)
def test_shards_of_a_lost_rank_come_from_the_memory_of_others(workshop: Workshop, short: Path, case: str) -> None:
    runtime, layout = case.split("-")
    # Without a checkpoint to go back to.
    said = run_that_loses(workshop, runtime, layout, lost=(1,), every=100)
    assert "from memory" in said and "checkpoint" not in said and "the beginning" not in said, said
    assert_equal(workshop.folder / f"{runtime}-{layout}-1", short)


@pytest.mark.soak
def test_the_ranks_of_a_lost_node_are_not_waited_for(workshop: Workshop, short: Path) -> None:
    said = run_that_loses(workshop, "distributed", "halves", lost=(2, 3), every=100)
    assert "2 ranks continue" in said and "checkpoint" not in said and "the beginning" not in said, said
    assert_equal(workshop.folder / "distributed-halves-2", short)


@pytest.mark.soak
@pytest.mark.parametrize("runtime", KILLED)
def test_shards_that_no_rank_has_come_from_the_newest_checkpoint(workshop: Workshop, short: Path, runtime: str) -> None:
    said = run_that_loses(workshop, runtime, "optimizer", lost=(1, 2), every=1)
    assert "from checkpoint" in said or "from the last checkpoint" in said, said
    assert_equal(workshop.folder / f"{runtime}-optimizer-2", short)

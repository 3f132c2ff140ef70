"""After the loss of a process, the run restarts from the newest complete checkpoint, up to the limit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from braidrl.cluster.watchdog import descendants, name_of
from tests.cases import soak_but
from tests.runtimes.streaming.test_on_ray import RayNodes
from tests.tiny import Workshop, braid, metrics_agree, wait_for_steps

CASES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    # A run's settings, the process to kill, and the steps after which it is killed.
    "streaming": ({"runtime": "streaming", "streaming": {"workers": {"actor": 2}}}, "actor-1", (1, 6)),
    "distributed": ({"runtime": "distributed", "workers": 2}, "rank 0", (4,)),
    "hybrid": ({"runtime": "hybrid", "workers": 2}, "ray::HybridWork", (1, 6)),
}


def kill(run: int, victim: str, known: list[int]) -> int:
    """Kill a process of a run by its name, but none of the known ones; return its process id."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        for process in set(descendants(run)) - set(known):
            if name_of(process).startswith(victim):
                os.kill(process, signal.SIGKILL)
                return process
        time.sleep(0.02)
    raise AssertionError(f"no {victim}")


@pytest.mark.parametrize("case", soak_but(["distributed"], CASES))
def test_a_lost_process_is_replaced_without_user_action(workshop: Workshop, case: str) -> None:
    settings, victim, moments = CASES[case]
    trainer = {"steps": 14, "checkpoint_every": 2, "deterministic": True}
    sections: dict[str, Any] = {**settings, "trackers": [], "dtype": "float64"}
    quiet = workshop.run("quiet", **{**sections, "runtime": "eager", "trainer": trainer, "streaming": {}})
    folder, killed = workshop.folder / "run", list[int]()
    config = workshop.config_file(**sections, trainer={**trainer, "max_restarts": 2})
    with braid("train", config, folder=workshop.folder) as process:
        try:
            for steps in moments:
                wait_for_steps(folder, steps, process)
                killed.append(kill(process.pid, victim, killed))
            _, output = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0 and output.count("starts again by itself") == len(moments), output
    assert metrics_agree(folder, quiet)
    # Before the first checkpoint the others have no state to resume, except ranks, which have it in memory.
    assert output.count("the others go on") == {"streaming": 2, "distributed": 1, "hybrid": 1}[case]
    assert output.count("from memory") == {"streaming": 2, "distributed": 2, "hybrid": 0}[case]


def kill_node_of_a_worker(nodes: RayNodes) -> None:
    """Kill Ray's daemon of a node with a worker, and thereby the node."""
    worker = next(pid for pid in descendants(nodes.process.pid) if name_of(pid).startswith("ray::HybridWork"))
    node = psutil.Process(worker).parent()
    assert node is not None and node.name() == "raylet"
    node.kill()


@pytest.mark.soak
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_run_continues_after_the_loss_of_its_workers_node(workshop: Workshop, comes_back: bool) -> None:
    """One other node has room for all workers, or with `comes_back` for one of two, until a node is added."""
    steps, every = (80, 4) if comes_back else (10, 2)
    trainer = {"steps": steps, "checkpoint_every": every, "deterministic": True}
    sections: dict[str, Any] = {"trackers": [], "dtype": "float64", "runtime": "hybrid", "workers": 2}
    quiet = workshop.run("quiet", **{**sections, "runtime": "eager", "trainer": trainer})
    # The main program is on the first node, which has no room for workers.
    nodes = RayNodes(0, 1, 1) if comes_back else RayNodes(0, 2, 2)
    sections["cluster"] = {"address": nodes.address}
    config, folder = workshop.config_file(**sections, trainer={**trainer, "max_restarts": 1}), workshop.folder / "run"
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(folder, 4, process)
            kill_node_of_a_worker(nodes)
            if comes_back:
                wait_for_steps(folder, 8, process)
                nodes.add(1)
            _, output = process.communicate(timeout=240)
        finally:
            process.kill()
            nodes.close()
    assert process.returncode == 0, output
    if comes_back:
        assert "continues with 1 of 2 workers" in output and "continues with 2 of 2 workers" in output, output
    else:
        assert output.count("starts again by itself") == 1, output
    assert metrics_agree(folder, quiet)

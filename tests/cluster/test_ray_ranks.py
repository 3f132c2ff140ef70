"""Ranks placed by Ray behave like ranks of this machine, and leave as little behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.ray_processes import RayLauncher
from braidrl.config import ClusterConfig, parse_config
from braidrl.errors import UserError, WorkerError
from braidrl.runtimes.restarts import train
from tests.cluster.test_processes import assert_gone, wait_until
from tests.invariants.traces import assert_same, trace
from tests.tiny import Workshop


def ray_ranks() -> RayLauncher:
    return RayLauncher(ClusterConfig(start_limit_s=120), "cpu")


@pytest.mark.soak
def test_ranks_on_ray_give_the_result_of_eager(workshop: Workshop, ray_cluster: None) -> None:
    sections = {"dtype": "float64", "trainer": {"rows_per_update": 8, "checkpoint_every": 1}}
    ranks = {"runtime": "distributed", "workers": 2, "cluster": {"launcher": "ray"}}
    ours = train(parse_config(workshop.tree("ray", **sections, **ranks)))
    assert_same(trace(ours), trace(workshop.run("eager", **sections)))


@pytest.mark.soak
def test_a_rank_that_fails_ends_all_and_devices_are_free_again(tmp_path: Path, ray_cluster: None) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    with pytest.raises(WorkerError, match=r"rank 1.*step 3,.*reward.verify.*\(0, 7, 1\):.*ValueError"):
        run_ranks("tests.cluster.ranks:failing", {"folder": str(tmp_path), "how": "raise"}, 2, 200.0, ray_ranks())
    assert_gone(tmp_path)
    wait_until(lambda: ray.available_resources().get("CPU") == free)


@pytest.mark.soak
def test_ctrl_c_ends_all_ranks(tmp_path: Path, ray_cluster: None) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks("tests.cluster.ranks:waiting", {"folder": str(tmp_path)}, 2, 200.0, ray_ranks())
    interrupter.join()
    assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("torchrun", {}, "cluster.launcher=torchrun, .* has not started"),
        ("ray", {"RANK": "0", "WORLD_SIZE": "2"}, "cluster.launcher=ray, .*torchrun has started"),
    ],
)
def test_another_launcher_than_the_one_at_work_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, launcher: str, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        train(parse_config(workshop.tree(runtime="distributed", cluster={"launcher": launcher})))


def test_more_ranks_than_devices_are_refused(workshop: Workshop, ray_cluster: None) -> None:
    with pytest.raises(UserError, match=r"40 CPUs \(rank: 40\) .* 16"):
        train(parse_config(workshop.tree(runtime="distributed", workers=40, cluster={"launcher": "ray"})))

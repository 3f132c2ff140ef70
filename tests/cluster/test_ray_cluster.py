"""Ray from a user's view: a clear message if it is missing, real placement groups, and no leftovers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import RayCluster, import_ray
from braidrl.config import ClusterConfig
from braidrl.errors import LostProcess, UserError
from braidrl.observe.trace import read_trace
from tests.cluster.seated import Seated
from tests.leftovers import listening
from tests.tiny import Workshop, braid, wait_for_steps

STARTED, ENDED = 400, 150
"""Time limit in seconds for a cluster to start, and to disappear, on a busy machine."""


def test_a_missing_ray_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else spec(name))
    with pytest.raises(UserError, match=r"runtime=hybrid .*Ray.*`pip install braidrl\[ray\]`"):
        import_ray()


def test_ray_that_is_late_to_start_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Ray gives up after 30 s, with an exception of no class of its own."""

    def late(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    ray = import_ray()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(UserError, match=r"Ray does not start.*\(The .*startup.\); "):
        RayCluster(ClusterConfig(), "cpu")


@pytest.mark.soak
def test_each_pool_has_its_own_devices_and_returns_them(ray_cluster: None) -> None:
    import ray

    cluster = RayCluster(ClusterConfig(start_limit_s=60), "cpu")
    free = settled(lambda: ray.available_resources().get("CPU"))
    assert not cluster.started, "the running cluster was not used"
    pools = [Pool(("actor",), 2), Pool(("critic",), 1)]
    seats = cluster.reserve(pools)
    actors = [[cluster.start(Seated, seat) for seat in pool] for pool in seats]
    groups = [[ray.get(actor.node.remote(), timeout=60) for actor in pool] for pool in actors]
    assert [len(set(pool)) for pool in groups] == [1, 1] and groups[0][0] != groups[1][0]
    assert eventually(lambda: ray.available_resources().get("CPU") == free - 3)
    cluster.close()
    assert eventually(lambda: ray.available_resources().get("CPU") == free)
    assert ray.is_initialized(), "a cluster that ran before keeps running"


@pytest.mark.soak
def test_unresponsive_actor_is_named(ray_cluster: None) -> None:
    import ray

    cluster = RayCluster(ClusterConfig(start_limit_s=60, silence_s=1), "cpu")
    actor = cluster.start(Seated, cluster.reserve([Pool(("actor",), 1)])[0][0])
    cluster.names[actor._actor_id.hex()] = "actor rank 0"
    process = ray.get(actor.process.remote(), timeout=60)
    assert os.getpriority(os.PRIO_PROCESS, process) == os.getpriority(os.PRIO_PROCESS, 0), (
        "workers run at a lower priority"
    )
    for asked in [[actor], [actor], [], [], [actor], [actor], [actor]]:
        cluster.actors = asked
        time.sleep(1.1)
        cluster.look()
        assert cluster.silence(actor) < 2, "time without requests triggers the watchdog"
    assert cluster.ready([actor.node.remote()], 60)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(LostProcess, match=r"actor rank 0 .* \d+ s"):
            cluster.ready([actor.node.remote()], 60)
    finally:
        os.kill(process, signal.SIGCONT)
        cluster.close()


def test_more_workers_than_devices_are_refused_before_any_starts(ray_cluster: None) -> None:
    cluster = RayCluster(ClusterConfig(), "cpu")
    with pytest.raises(UserError, match=r"40 CPUs \(actor: 40\) .* 16"):
        cluster.reserve([Pool(("actor",), 40)])
    assert cluster.groups == [] and cluster.actors == []


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the environment of every process that the test starts, so that the test can find them."""
    name = f"BRAID_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(name, "1")
    yield name
    for process in marked(name):
        os.kill(process, signal.SIGKILL)


def marked(name: str) -> list[int]:
    """Return the other processes whose environment has the mark."""
    result = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment, state = (folder / "environ").read_bytes(), (folder / "stat").read_text()
            except OSError:
                continue
            if name.encode() in environment and state.rpartition(")")[2].split()[0] != "Z":
                result.append(int(folder.name))
    return result


def eventually(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + ENDED
    while not what() and time.monotonic() < deadline:
        time.sleep(0.1)
    return what()


def settled(what: Callable[[], float | None], seconds: float = 1.0) -> float | None:
    """Return a value once it has been stable for a while; Ray frees devices of ended actors with a delay."""
    value, since = what(), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.1)
        if (now := what()) != value:
            value, since = now, time.monotonic()
    return value


def start(workshop: Workshop, workers: int, steps: int = 10_000) -> subprocess.Popen[str]:
    trainer = {"steps": steps}
    config = workshop.config_file(runtime="hybrid", workers=workers, cluster={"cpus": workers}, trainer=trainer)
    return braid("train", config)


def worker_processes(name: str) -> list[int]:
    return [p for p in marked(name) if b"HybridWorker" in Path(f"/proc/{p}/cmdline").read_bytes()]


def assert_nothing_is_left(mark: str, sockets: set[int]) -> None:
    """Assert that no marked process is left, and none of the sockets that they listened on."""
    assert eventually(lambda: not marked(mark)), marked(mark)
    # An ending process frees its environment, which identifies it, before its sockets.
    assert sockets and eventually(lambda: not sockets & listening())


@pytest.mark.soak
def test_a_run_that_ends_well_leaves_no_process_and_no_port(workshop: Workshop, mark: str) -> None:
    process = start(workshop, 2, steps=3)
    wait_for_steps(workshop.folder / "run", 1, process, STARTED)
    sockets = listening(marked(mark))
    _, errors = process.communicate(timeout=STARTED)
    assert process.returncode == 0, errors
    assert_nothing_is_left(mark, sockets)


@pytest.mark.soak
def test_ctrl_c_saves_and_leaves_no_process_and_no_port(workshop: Workshop, mark: str) -> None:
    process = start(workshop, 1)
    run = workshop.folder / "run"
    wait_for_steps(run, 2, process, STARTED)
    assert len(worker_processes(mark)) == 1
    sockets = listening(marked(mark))
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=ENDED)
    assert process.returncode == 130, errors
    assert "go on with: braid train --resume" in errors
    assert (run / "checkpoints" / "latest").is_file()
    assert_nothing_is_left(mark, sockets)
    spans = read_trace(run)
    assert {span.worker for span in spans} == {"actor+reference-0", "controller"}
    assert {span.stage for span in spans} >= {"actor.generate", "reward.verify", "reference.log_probs", "actor.update"}


@pytest.mark.soak
def test_killed_worker_ends_run_without_leaving_process_or_port(workshop: Workshop, mark: str) -> None:
    process = start(workshop, 2)
    wait_for_steps(workshop.folder / "run", 1, process, STARTED)
    sockets = listening(marked(mark))
    os.kill(worker_processes(mark)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=ENDED)
    assert process.returncode == 1, errors
    assert ("actor+reference rank" in errors and "died in" in errors) or "failed in" in errors
    assert_nothing_is_left(mark, sockets)


@pytest.mark.soak
def test_pools_pin_nodes_and_kinds_and_ranks_are_in_node_order() -> None:
    # The tests of this process share another cluster.
    with ProcessPoolExecutor(1, get_context("spawn")) as own:
        own.submit(assert_pinned_pools_are_in_node_order).result(STARTED)


def assert_pinned_pools_are_in_node_order() -> None:
    """Reserve pools with kinds and nodes on a cluster of four nodes."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for kind in ("H100", "H100", "L4"):
            nodes.add_node(num_cpus=4, num_gpus=2, resources={f"accelerator_type:{kind}": 1})
        nodes.wait_for_nodes()
        ray.init(nodes.address)
        with pytest.raises(UserError, match=r"actor .*5 CUDA devices.* 2;.* rollout.nodes=2"):
            RayCluster(ClusterConfig(), "cuda").reserve([Pool(("actor",), 1, engines=1, engine_devices=4)])
        cluster = RayCluster(ClusterConfig(start_limit_s=120), "cpu")
        with pytest.raises(UserError, match=r"actor .*kind A100-80GB, .* H100, L4; "):
            cluster.reserve([Pool(("actor",), 2, kind="A100-80GB")])
        (pinned, small, packed) = cluster.reserve(
            [Pool(("actor",), 4, kind="H100-80GB", nodes=2), Pool(("critic",), 2, kind="L4"), Pool(("reference",), 5)]
        )
        places = [place.node for place in pinned]
        assert places[0] == places[1] != places[2] == places[3]
        assert len({place.node for place in small} - set(places)) == 1
        own = [place.node for place in packed]
        assert own == sorted(own, key=own.index), "ranks of a node are neighbours"
        cluster.close()
    finally:
        ray.shutdown()
        nodes.shutdown()

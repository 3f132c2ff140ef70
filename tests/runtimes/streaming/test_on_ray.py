"""Streaming workers on a Ray cluster of two nodes.

Both are this machine, but told apart by name, so that rows travel between them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.observe.metrics import read_metrics
from braidrl.queue.owner import remove_abandoned
from tests.runtimes.streaming.test_program import assert_same, faulty, sections_of, without_owner
from tests.tiny import ROOT, Workshop, braid, recorded, sums, wait_for_steps, write_jsonl, write_model

BETWEEN = "transfer/bytes_between_nodes"
ENDED_S = 30.0
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for cpus in sys.argv[1:]:
    cluster.add_node(num_cpus=int(cpus), object_store_memory=80 << 20, include_dashboard=False)
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.add_node(num_cpus=int(line), object_store_memory=80 << 20)
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("streaming-on-ray")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(24)))


class RayNodes:
    """A cluster in a process of its own, as this one may have one already; `cpus` of each node, the head first."""

    def __init__(self, *cpus: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, *map(str, cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        # Ray prints too; the address is the last token.
        self.address = next(line.strip() for line in self.process.stdout if line.count(":") == 1 and line[0].isdigit())

    def run(self, **sections: Any) -> dict[str, Any]:
        return {"runtime": "streaming", "cluster": {"launcher": "ray", "address": self.address}, **sections}

    def actors(self) -> list[int]:
        """Processes that a run has on the nodes."""
        result = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if {"ray::ProcessActor", "ray::StorageNode"} & set(
                    " ".join(process.cmdline()).replace(".", " ").split()
                ):
                    result.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return result

    def add(self, cpus: int) -> None:
        """Start another node, soon."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{cpus}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    nodes = RayNodes(2, 2)
    yield nodes
    nodes.close()


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: RayNodes) -> Iterator[None]:
    """Fails a test after which an actor or memory is left on a node; the ports that actors listen on are theirs."""
    remove_abandoned()
    before = without_owner()
    yield
    deadline = time.monotonic() + ENDED_S
    while cluster.actors():
        assert time.monotonic() < deadline, f"processes {cluster.actors()} are still there"
        time.sleep(0.1)
    assert remove_abandoned() == []
    assert without_owner() <= before


@pytest.mark.soak
def test_two_nodes_with_killed_worker_equal_eager(workshop: Workshop, cluster: RayNodes) -> None:
    sections = sections_of("grpo", 3)
    path = workshop.config_file("ours", **cluster.run(**sections))
    command = [sys.executable, "-m", "tests.runtimes.on_ray", str(path), "actor.generate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["starts"] == {"actor.generate": 1, "reference": 0, "actor": 0, "rows": 0}
    assert len(told["runs"]) == 2
    assert not [path for run in told["runs"] for path in shared_folder().glob(f"{PREFIX}{run}*")]
    ours = workshop.folder / "ours"
    assert_same(workshop.run("eager", **sections), ours)
    lines = read_metrics(ours)
    assert all(line[BETWEEN] > 0 for line in lines)
    uids = [uid for step in range(1, 4) for uid in recorded(ours, step).uids()]
    assert len(uids) == len(set(uids)) == 3 * 16


@pytest.mark.soak
def test_an_exception_on_a_node_ends_the_run_with_its_traceback(workshop: Workshop, cluster: RayNodes) -> None:
    process = braid("train", workshop.config_file("faulty", **cluster.run(**faulty(workshop))))
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 1, errors
    assert errors.count("Traceback") == 1, "the worker's own, and not that of the main program too"
    for part in ("braid: actor-0 failed", "the shape of water", "stage faulty", "rows (0, "):
        assert part in errors


@pytest.mark.soak
def test_ctrl_c_saves_and_leaves_nothing_on_any_node(workshop: Workshop, cluster: RayNodes) -> None:
    process = braid("train", workshop.config_file("interrupted", **cluster.run(**sections_of("grpo", 1000))))
    wait_for_steps(workshop.folder / "interrupted", 2, process, 250)
    assert len(cluster.actors()) == 4, "three workers, and the server of the node beside the main program's"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    steps = len(read_metrics(workshop.folder / "interrupted"))
    assert (workshop.folder / "interrupted" / "checkpoints" / "latest").read_text() == f"step-{steps}\n"


@pytest.mark.soak
def test_doctor_reports_missing_items_per_node(cluster: RayNodes, workshop: Workshop) -> None:
    missing = workshop.folder / "nowhere.jsonl"
    process = braid(
        "doctor",
        "--cluster",
        f"model={workshop.model}",
        f"data.train={missing}",
        f"output={workshop.folder / 'shared'}",
        f"cluster.address={cluster.address}",
    )
    output, errors = process.communicate(timeout=240)
    lines = output.splitlines()
    assert process.returncode == 1, errors
    nodes = [line.partition(":")[0] for line in lines if not line.startswith("PROBLEM")]
    assert len(set(nodes)) == 2, output
    assert lines[2:] == [f"PROBLEM: {node}: data.train: {missing} is not there" for node in nodes], output
    assert not list((workshop.folder / "shared").iterdir()), "what the nodes wrote is gone"

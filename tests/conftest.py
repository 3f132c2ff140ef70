"""Shared settings of all tests: one thread per process, and a fixed hypothesis profile."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

gc.disable()  # No garbage collection during the imports below.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from braidrl.cluster.local import copy_as_fork_server
from braidrl.cluster.shared_memory import shared_folder
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS

if TYPE_CHECKING:
    from tests.runtimes.hybrid.warm import WarmCluster

from tests.redis_server import redis_server  # noqa: F401 (a fixture for every test)
from tests.tiny import MODELS, Workshop, sums, write_jsonl, write_model

torch.set_num_threads(1)
gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)  # Same settings as in the command and its processes.
gc.enable()
PRELOADED = "tests.preloaded"
"""The module that imports whatever the ranks and workers of tests need."""
OWN_MEMORY, PRINTED = pytest.StashKey[Path](), pytest.StashKey[Path]()
"""The folder for this process's shared memory, and the file to which its fork server's copies print."""
PRINTED_SHOWN = 20_000
"""The most characters of a failed test's processes that are shown."""
LONG = {"Workshop", "TrainingRun", "train", "run_ranks", "subprocess"}
"""Names in a module whose tests make runs or start processes."""
# These share one Ray cluster and its workers, so that a single process runs them all.
ON_RAY = tuple(
    f"tests/{place}"
    for place in (
        "cluster/test_devices.py",
        "cluster/test_ray_",
        "examples/test_placements.py",
        "invariants/test_one_flow_one_result.py",
        "runtimes/generating/",
        "runtimes/hybrid/",
        "runtimes/test_numbers.py",
        "runtimes/test_session.py",
    )
)
settings.register_profile("suite", deadline=None, max_examples=20)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before pytest has a fault handler, whose file is not open in the copies
def pytest_configure(config: pytest.Config) -> None:
    """Copy this process as the fork server of its tests, unless worker processes run the tests.

    The copies print to a file.
    """
    if config.getoption("dist", "no") != "no":
        return
    # Keep shared memory apart from that of other test runs and other users of this machine.
    memory = config.stash[OWN_MEMORY] = Path(tempfile.mkdtemp(prefix="braid-tests-", dir=shared_folder()))
    os.environ["BRAID_SHARED_MEMORY"] = str(memory)
    printed = config.stash[PRINTED] = memory / "printed"
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    captured = sys.stdout, sys.stderr
    try:
        with printed.open("ab") as file:
            for stream in kept:
                os.dup2(file.fileno(), stream)
        sys.stdout, sys.stderr = (open(stream, "w", closefd=False, buffering=1) for stream in kept)  # noqa: SIM115
        copied = copy_as_fork_server([PRELOADED])
    finally:
        sys.stdout, sys.stderr = captured
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
    assert copied, "a plugin has started a thread, with which this process cannot be copied"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove this process's shared memory."""
    if OWN_MEMORY in config.stash:
        shutil.rmtree(config.stash[OWN_MEMORY], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Begin the file of a test's processes anew."""
    os.truncate(item.config.stash[PRINTED], 0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what a failed test's processes have printed."""
    report = yield
    if report.failed and (printed := item.config.stash[PRINTED].read_text(errors="replace")[-PRINTED_SHOWN:]):
        report.sections.append(("Printed by its processes", printed))
    return report


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which would otherwise take a tenth of the tests' time."""
    gc.freeze()


class Scheduling(LoadFileScheduling):
    """Assign all tests of a file to one process, and all files that use Ray to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "on Ray" if nodeid.startswith(ON_RAY) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Return the scheduler that distributes tests over processes."""
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start a shared run with the files that use Ray, then those that make runs, so that all processes end with short
    tests.
    """
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (
                not item.nodeid.startswith(ON_RAY),
                LONG.isdisjoint(vars(item.getparent(pytest.Module).obj)),
            )
        )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a Hugging Face directory for each of the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in MODELS}


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return forty one-digit sums with answers and responses."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", sums(40))


@pytest.fixture
def workshop(tmp_path: Path, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    """Return a workshop for runs on the tiny Qwen3 in the test's folder."""
    return Workshop(tmp_path, tiny_models["qwen3"], sums_file)


@pytest.fixture(scope="session")
def ray_cluster(pytestconfig: pytest.Config) -> Iterator[None]:
    """Start one Ray cluster for all tests, with as many CPUs and devices as they request, whatever this machine has."""
    # Imported here, because the import takes a second that tests without Ray need not spend.
    from braidrl.cluster.ray_cluster import import_ray
    from tests import ray_workers

    ray = import_ray()
    os.environ[ray_workers.SERVER] = str(pytestconfig.stash[OWN_MEMORY] / "ray_workers")
    server = multiprocessing.get_context("forkserver").Process(
        target=ray_workers.serve, args=(os.environ[ray_workers.SERVER], os.getpid()), daemon=True
    )
    server.start()
    with pytest.MonkeyPatch.context() as patched:
        # Three processes of Ray read its logs, its load and its state all the time, for nothing that a test needs.
        settings = partial(
            ray._private.parameter.RayParams,
            setup_worker_path=ray_workers.__file__,
            include_log_monitor=False,
            no_monitor=True,
        )
        patched.setattr(ray._private.parameter, "RayParams", settings)
        patched.setattr(ray._private.node.Node, "start_api_server", lambda node, **_: None)
        ray.init(
            "local",
            num_cpus=16,
            num_gpus=8,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield
    ray.shutdown()
    server.kill()


@pytest.fixture(scope="session")
def warm_workers(ray_cluster: None) -> WarmCluster:
    """Return workers that backends of several tests share."""
    from tests.runtimes.hybrid.warm import WarmCluster

    return WarmCluster()


@pytest.fixture
def warm_cluster(warm_workers: WarmCluster, monkeypatch: pytest.MonkeyPatch) -> WarmCluster:
    """Make this test's backends start on shared workers instead of new processes."""
    monkeypatch.setattr("braidrl.runtimes.hybrid.driver.RayCluster", lambda config, device: warm_workers)
    return warm_workers

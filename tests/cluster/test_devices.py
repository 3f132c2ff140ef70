"""Every process gets its own devices under every launcher, and a shortage is refused with both numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.devices import Devices, assign_devices, device_lines, visible_devices
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import ProcessSpec, environment_of
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.ray_processes import RayLauncher
from braidrl.config import ClusterConfig
from braidrl.errors import UserError

ROOT = Path(__file__).parent.parent.parent
ENGINES = Pool(("actor",), 1, engines=2, engine_devices=2)


def seen_by(launcher: Any, pools: list[Pool]) -> list[str]:
    """Start every process of the pools and return the CUDA_VISIBLE_DEVICES that each reports."""
    launcher.reserve(pools)
    try:
        started = [
            launcher.start(
                pool.name,
                number,
                ProcessSpec(f"{pool.name}-{number}", "tests.cluster.ranks:device_of_a_worker", {}),
            )
            for pool in pools
            for number in range(pool.workers)
        ]
        for process in started:
            assert launcher.answered([process], 100.0), "the process printed nothing"
        result = [process.outcome.result for process in started]
        for process in started:
            process.close()
        return result
    finally:
        launcher.close()


def invent(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_process_gets_a_device_of_its_own(devices: int) -> None:
    table = assign_devices(
        [Pool(("a",), devices // 2), Pool(("b",), devices // 2), Pool(("rewards",), 3, device=False)], devices
    )
    assert [table[f"{pool}-{n}"].every for pool in "ab" for n in range(devices // 2)] == [(n,) for n in range(devices)]
    assert [table[f"rewards-{n}"].every for n in range(3)] == [(), (), ()]


@pytest.mark.parametrize(
    ("devices", "table"),
    [
        (4, Devices((0, 1, 2, 3), ((0, 1), (2, 3)))),
        (8, Devices((0, 1, 2, 3, 4), ((1, 2), (3, 4)))),
    ],
)
def test_engines_share_trainer_devices_only_if_devices_are_short(devices: int, table: Devices) -> None:
    assert assign_devices([ENGINES], devices) == {"actor-0": table}


def test_too_few_devices_error_names_both_numbers_and_setting() -> None:
    with pytest.raises(UserError, match=r"4 CUDA devices \(actor: 4\).* 2;.*`workers`"):
        assign_devices([ENGINES], 2)


@given(
    st.lists(
        st.builds(Pool, st.just(()), st.integers(1, 4), st.booleans(), st.integers(0, 3), st.integers(1, 3)), max_size=4
    ),
    st.integers(0, 64),
)
def test_no_two_processes_share_a_device_and_no_two_engines_do(made: list[Pool], devices: int) -> None:
    pools = [Pool((str(n),), p.workers, p.device, p.engines, p.engine_devices) for n, p in enumerate(made)]
    try:
        table = assign_devices(pools, devices)
    except UserError:
        assert sum(p.workers * max(1, p.engines * p.engine_devices) for p in pools if p.device) > devices
        return
    every = [device for own in table.values() for device in own.every]
    assert len(every) == len(set(every)) and set(every) <= set(range(devices))
    for own in table.values():
        engines = [device for engine in own.engines for device in engine]
        assert len(engines) == len(set(engines)) and set(engines) <= set(own.every)


def test_a_rank_of_torchrun_takes_its_share_of_its_nodes_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    result = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        result.append((visible_devices(4).every, visible_devices(8, engines=1).engines))
    assert result == [((0,), ((1,),)), ((1,), ((3,),)), ((2,), ((5,),)), ((3,), ((7,),))]
    with pytest.raises(UserError, match=r"4 CUDA devices \(rank: 4\).* 2"):
        visible_devices(2)


def test_process_sees_devices_under_its_parents_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ProcessSpec("engine", "module:function", devices=(1, 2), threads=3)
    told = environment_of(spec, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c", "OMP_NUM_THREADS": "8"})
    assert told == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-c", "OMP_NUM_THREADS": "3"}
    assert environment_of(spec, {})["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert environment_of(ProcessSpec("engine", "module:function"), {"A": "b"}) == {"A": "b"}


GENERATES, TRAINS = Pool(("actor.generate",), 1, engines=1, engine_devices=2), Pool(("actor",), 1)


TABLES: list[tuple[int, list[Pool], list[str]]] = [
    (2, [TRAINS, Pool(("critic",), 1), Pool(("compute",), 1, device=False)], ["0", "1", ""]),
    (4, [GENERATES, TRAINS], ["0,1,2", "3"]),
    (8, [replace(GENERATES, workers=2), replace(TRAINS, workers=2)], ["0,1,2", "3,4,5", "6", "7"]),
]
"""Numbers of devices, the processes that share them, and the devices that each process sees."""
FIRST_TABLE = [TABLES[0], *(pytest.param(*table, marks=pytest.mark.soak) for table in TABLES[1:])]


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "pools", "seen"), FIRST_TABLE)
def test_processes_of_this_machine_report_the_devices_that_they_were_given(
    monkeypatch: pytest.MonkeyPatch, devices: int, pools: list[Pool], seen: list[str]
) -> None:
    invent(monkeypatch, devices)
    assert seen_by(LocalLauncher("cuda"), pools) == seen


def test_ranks_that_torchrun_starts_report_the_devices_that_they_take(tmp_path: Path) -> None:
    """Each rank has an engine of two processes, if there are enough devices."""
    tables = {
        2: [Devices((0,), ((0,),)), Devices((1,), ((1,),))],
        4: [Devices((0, 1), ((1,),)), Devices((2, 3), ((3,),))],
        8: [Devices((0, 1, 2), ((1, 2),)), Devices((3, 4, 5), ((4, 5),))],
    }
    script = tmp_path / "rank.py"
    script.write_text(
        "from braidrl.cluster.devices import visible_devices\n"
        f"print(*(f'{{n}}: {{visible_devices(n, 1, n // 4 or 1)}}\\n' for n in {[*tables]}), sep='', end='')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{devices}: {own}" for devices, ranks in tables.items() for own in ranks]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.soak
def test_ranks_of_this_machine_report_the_devices_that_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, 2)
    assert run_ranks("tests.cluster.ranks:devices", {}, 2, 200.0, LocalLauncher("cuda")) == ["0", "1"]
    with pytest.raises(UserError, match=r"3 CUDA devices \(rank: 3\).* 2"):
        run_ranks("tests.cluster.ranks:devices", {}, 3, 200.0, LocalLauncher("cuda"))


@pytest.fixture
def ray_devices(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that limits the devices of the Ray cluster."""
    import ray

    held: list[Any] = []

    def leave(devices: int) -> None:
        there = ray.cluster_resources()
        monkeypatch.setattr(ray, "cluster_resources", lambda: {**there, "GPU": devices})
        if others := int(there["GPU"]) - devices:
            held.append(ray.util.placement_group([{"GPU": others}]))
            ray.get(held[-1].ready(), timeout=100)

    yield leave
    for group in held:
        ray.util.remove_placement_group(group)


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "pools", "seen"), TABLES)
def test_processes_on_ray_report_the_devices_that_they_were_given(
    ray_devices: Callable[[int], None], devices: int, pools: list[Pool], seen: list[str]
) -> None:
    """Ray chooses the devices."""
    ray_devices(devices)
    result = seen_by(RayLauncher(ClusterConfig(start_limit_s=100), "cuda"), pools)
    assert [len(own.split(",")) for own in result] == [len(own.split(",")) for own in seen]
    given = [device for own in result if own for device in own.split(",")]
    assert len(set(given)) == len(given) == devices
    assert [own == "" for own in result] == [own == "" for own in seen]


def test_the_device_table_is_printed_in_lines() -> None:
    assert device_lines(assign_devices([ENGINES, Pool(("critic",), 1)], 6)) == [
        "actor-0: cuda:0",
        "actor-0, engine 0: cuda:1 cuda:2",
        "actor-0, engine 1: cuda:3 cuda:4",
        "critic-0: cuda:5",
    ]

"""What passes through the driver: at most 64 bytes for each row of a step and 1 kB for each worker, at the start too.

Counted is every message to and from workers, and what is put into Ray's object store for all of them. What Ray itself says to start
an actor or to pass a message on is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.ray_cluster import RayCluster
from braidrl.cluster.world import World
from braidrl.data.rows import Rows
from braidrl.flow.compute import with_state
from braidrl.observe.progress import Progress
from braidrl.runtimes.controller import SerialController
from braidrl.runtimes.hybrid.handles import Answer, Part
from braidrl.runtimes.hybrid.messages import pack, pack_index, unpack, unpack_index
from braidrl.runtimes.hybrid.start import start_hybrid_backend
from braidrl.runtimes.prepare.flow import build_flow
from braidrl.runtimes.prepare.setup import prepare_together
from tests.runtimes.hybrid.played import PlayedCluster
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop

ROWS_EACH = 8
PER_ROW, PER_WORKER = 64, 1024


def measured(workshop: Workshop, workers: int, cluster: RayCluster) -> tuple[int, list[int]]:
    """Return the bytes through the driver at the start, and of each of two steps of GRPO with their records."""
    config = workshop.config(
        flow="grpo", algorithm={"kl_coef": 0.01}, runtime="hybrid", workers=workers,
        rollout={"samples_per_prompt": ROWS_EACH}, trainer={"prompts_per_step": workers},
    )  # fmt: skip
    prepared, steps = prepare_together(config, World()), []
    backend = start_hybrid_backend(prepared, Progress(0), workshop.folder, cluster=cluster)
    try:
        traffic = backend.home.traffic
        started = traffic.sent + traffic.received
        controller = SerialController(config, prepared.flow, backend)
        for iteration in (1, 2):
            before = traffic.sent + traffic.received
            result = controller.iterate(iteration, iteration - 1)
            backend.record(Path(workshop.folder / f"{iteration}.parquet"), result.table, result.final)
            assert len(result.batch) == workers * ROWS_EACH
            steps.append(traffic.sent + traffic.received - before)
        return started, steps
    finally:
        backend.close()


@pytest.mark.parametrize(
    "workers", [2, pytest.param(4, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.soak)]
)
def test_the_start_and_each_step_take_a_bounded_number_of_bytes_for_each_row_and_worker(
    workshop: Workshop, warm_cluster: WarmCluster, workers: int, record_property: Any
) -> None:
    started, steps = measured(workshop, workers, warm_cluster)
    record_property("bytes", [started, *steps])
    assert max(steps) <= workers * (PER_ROW * ROWS_EACH + PER_WORKER), steps
    assert started <= workers * PER_WORKER, started


@pytest.mark.parametrize("workers", [64, pytest.param(1024, marks=pytest.mark.soak)])
def test_so_does_a_driver_of_many_workers(
    workshop: Workshop, ray_cluster: None, workers: int, record_property: Any
) -> None:
    cluster = PlayedCluster()
    started, steps = measured(workshop, workers, cluster)
    record_property("bytes", [started, *steps])
    assert max(steps) <= workers * (PER_ROW * ROWS_EACH + PER_WORKER), steps
    assert started <= workers * PER_WORKER, started


NUMBERS = st.sampled_from(
    [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float32, torch.bfloat16]
)


@given(st.lists(st.tuples(NUMBERS, st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3)), max_size=5))
def test_index_columns_come_back_as_they_were(columns: list[tuple[torch.dtype, list[float]]]) -> None:
    rows = Rows({str(n): torch.tensor(values).abs().to(dtype) for n, (dtype, values) in enumerate(columns)})
    back = unpack_index(pack_index(rows))
    assert list(back) == list(rows)
    assert all(back[name].dtype == rows[name].dtype and torch.equal(back[name], rows[name]) for name in rows)


def test_what_is_not_a_number_stays_so() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-300], dtype=torch.float64)
    back = unpack_index(pack_index(Rows({"score": values})))["score"]
    assert torch.equal(back.view(torch.int64), values.view(torch.int64))


def test_stages_that_both_know_travel_as_numbers_with_what_differs(workshop: Workshop) -> None:
    stages = build_flow(workshop.config(flow="ppo", algorithm={"reward": "verify", "kl_target": 0.5})).stages
    moved = with_state(stages[-1], {"old": "self"})
    message = pack([*stages, moved], stages)
    assert unpack(message, stages) == [*stages, moved] and len(message) < 150
    assert unpack(pack(list(stages))) == list(stages)


def test_parts_and_answers_come_back_as_they_were() -> None:
    kept = (3, ("tokens",), np.array([5, -1, 700]), np.array([0, 0, 90_000]))
    part = unpack(pack(Part(3, b"index", (kept,))))
    ((key, columns, workers, rows),) = part.kept
    assert (part.size, part.index, key, columns) == (3, b"index", 3, ("tokens",))
    assert workers.tolist() == [5, -1, 700] and rows.tolist() == [0, 0, 90_000]
    assert Part(1, pack_index(Rows({"score": torch.ones(1)}))).uids() == [], "a message of a failure asks for them"
    for answer in (
        Answer(),
        Answer(result=0),
        Answer(b"", ("tokens",), 0, 0),
        Answer(b"i", (), 1, 2, {"a": (1.0, 2)}, 0.5, [1]),
    ):
        assert vars(unpack(pack(answer))) == vars(answer)

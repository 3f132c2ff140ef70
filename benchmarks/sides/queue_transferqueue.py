"""TransferQueue with its storage units as Ray actors: put, then get the metadata and the data of ready rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.tables import BATCH, COLUMNS, QUEUED, SMALL, queued, read, turn, values
from benchmarks.turns import Channel


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        transfer_queue.init()
        client = transfer_queue.get_client()
        shapes = (*QUEUED.values(), SMALL, BATCH)
        tables = {shape: TensorDict(queued(*shape), batch_size=shape[0]) for shape in shapes}
        sums = {shape: read(values(table[name]) for name in COLUMNS) for shape, table in tables.items()}
        numbers = itertools.count()

        def once(name: str, shape: tuple[int, int]) -> tuple[float, float]:
            partition = f"step-{next(numbers)}"
            start = time.perf_counter()
            client.put(tables[shape], partition_id=partition)
            put = time.perf_counter()
            found = client.get_meta(list(COLUMNS), shape[0], partition, task_name="train")
            data = client.get_data(found)
            got = read(values(data[name]) for name in COLUMNS)
            end = time.perf_counter()
            assert got == sums[shape]
            client.clear_partition(partition)
            return put - start, end - put

        for shape in shapes:
            once("warm", shape)
        channel.send({"ready": True})
        while channel.wait_for_turn():
            channel.report(turn(once))
    finally:
        transfer_queue.close()
        ray.shutdown()

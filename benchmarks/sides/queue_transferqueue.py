"""TransferQueue with its storage units as Ray actors: put, then the metadata and the data of what is ready."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.tables import COLUMNS, QUEUED, queued, read, repeats
from benchmarks.turns import Channel


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        transfer_queue.init()
        client = transfer_queue.get_client()
        tables = {shape: TensorDict(queued(*shape), batch_size=shape[0]) for shape in QUEUED}
        sums = {shape: read(table[name] for name in COLUMNS) for shape, table in tables.items()}
        numbers = itertools.count()

        def pass_through(shape: tuple[int, int]) -> tuple[float, float]:
            partition = f"step-{next(numbers)}"
            start = time.perf_counter()
            client.put(tables[shape], partition_id=partition)
            put = time.perf_counter()
            found = client.get_meta(list(COLUMNS), shape[0], partition, task_name="train")
            data = client.get_data(found)
            got = read(data[name] for name in COLUMNS)
            end = time.perf_counter()
            assert got == sums[shape]
            client.clear_partition(partition)
            return put - start, end - put

        for shape in QUEUED:
            pass_through(shape)
        channel.send({"ready": True})
        while channel.wait_for_turn():
            found = {}
            for rows, tokens in QUEUED:
                times = [pass_through((rows, tokens)) for _ in range(repeats(tokens))]
                found[f"put {rows} rows"], found[f"get {rows} rows"] = map(median, zip(*times, strict=True))
            channel.report(found)
    finally:
        transfer_queue.close()
        ray.shutdown()

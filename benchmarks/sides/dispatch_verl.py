"""verl's single controller: rows go from the driver to the workers and come back, by DP_COMPUTE_PROTO."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.tables import COLUMNS, DISPATCHED, TOKENS, dispatched, read, repeats, timed
from benchmarks.turns import Channel


class EchoWorker(Worker):
    """Returns its input after reading it."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        read(data.batch.values())
        return data


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    ray.init(address="local", num_cpus=sum(case["workers"]), include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(EchoWorker)
        groups = {
            size: RayWorkerGroup(
                RayResourcePool([size], use_gpu=False, max_colocate_count=1), RayClassWithInitArgs(cls=actor)
            )
            for size in case["workers"]
        }
        tables = {tokens: DataProto(batch=TensorDict(dispatched(tokens), batch_size=DISPATCHED)) for tokens in TOKENS}

        def call(size: int, tokens: int) -> None:
            data = tables[tokens]
            back = groups[size].echo(data)
            assert read(back.batch[name] for name in COLUMNS) == sums[tokens]

        sums = {tokens: read(data.batch.values()) for tokens, data in tables.items()}
        for size in case["workers"]:
            for tokens in TOKENS:
                call(size, tokens)
        channel.send({"ready": True})
        while channel.wait_for_turn():
            channel.report(
                {
                    f"{size} workers, {tokens} tokens": timed(partial(call, size, tokens), repeats(tokens))
                    for size in case["workers"]
                    for tokens in TOKENS
                }
            )
    finally:
        ray.shutdown()

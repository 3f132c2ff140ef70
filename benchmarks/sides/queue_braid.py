"""Braid's transfer queue, with a storage unit and a controller in separate processes: put, then get the ready rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.tables import BATCH, COLUMNS, QUEUED, SMALL, queued, read, turn, values
from benchmarks.turns import Channel
from braidrl.algorithms.ragged import Ragged
from braidrl.queue.transfer_queue import TransferQueue


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    tables = {shape: queued(*shape) for shape in (*QUEUED.values(), SMALL, BATCH)}
    sums = {shape: read(map(values, table.values())) for shape, table in tables.items()}
    numbers = itertools.count()
    with TransferQueue.serve({"train": list(COLUMNS)}) as queue:

        def once(name: str, shape: tuple[int, int]) -> tuple[float, float]:
            first = next(numbers) << 20
            rows = list(range(first, first + shape[0]))
            start = time.perf_counter()
            queue.put(tables[shape], rows, table=name)
            put = time.perf_counter()
            batch = queue.get("train", shape[0], table=name)
            assert batch is not None
            columns = (batch[column] for column in COLUMNS)
            got = read(column.values if isinstance(column, Ragged) else column for column in columns)
            end = time.perf_counter()
            assert got == sums[shape] and batch.rows == rows
            assert not queue.done(batch)
            return put - start, end - put

        for shape in tables:
            once("warm", shape)
        channel.send({"ready": True})
        while channel.wait_for_turn():
            channel.report(turn(once))

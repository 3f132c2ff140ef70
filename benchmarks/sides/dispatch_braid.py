"""Braid's hybrid workers on Ray, in two ways.

held       the driver holds the rows, distributes them by the DP protocol as codec frames, and collects them, as verl
           does
handles    workers hold the rows; the driver sends handles, every row moves to another worker, index columns come back
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.tables import COLUMNS, DISPATCHED, TOKENS, dispatched, read, repeats, timed
from benchmarks.turns import Channel
from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import RayCluster, import_ray
from braidrl.config import ClusterConfig
from braidrl.data.codec import decode, encode, pack_rows, unpack_rows
from braidrl.data.rows import Column, Rows
from braidrl.flow import Kind, Stage
from braidrl.observe.metrics import Sums
from braidrl.runtimes.hybrid.group import WorkerGroup
from braidrl.runtimes.hybrid.handles import READ, CallResult, Handle, Output
from braidrl.runtimes.hybrid.hybrid_worker import HybridWorker, RunOrder
from braidrl.runtimes.hybrid.protocols import PROTOCOLS

ECHO = Stage("echo", "echo", None, kind=Kind.COMPUTE, reads=COLUMNS, writes=(*COLUMNS, "score"))


class Echo:
    """Stand-in for an executor: returns its input after reading it."""

    def run(self, stage: Stage, rows: Rows, sums: Sums, stop: None = None) -> dict[str, Column]:
        read(rows[name].values for name in COLUMNS)
        return {**{name: rows[name] for name in COLUMNS}, "score": rows["sample"]}

    def close(self) -> None:
        """Release nothing."""


class EchoWorker(HybridWorker):
    """A worker whose stages return their input."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.executor: Any = Echo()

    def echo(self, frames: Sequence[Any]) -> list[Any]:
        """Return the driver's rows, which come and go as codec frames."""
        rows = decode([memoryview(frame) for frame in frames])
        return arrays(rows.with_columns({k: v for k, v in self.executor.run(ECHO, rows, Sums()).items() if k in rows}))

    def take_place(self, number: int, pools: Sequence[Pool], family: str) -> None:
        """Join the workers of these pools."""
        places = [(pool, rank) for pool in pools for rank in range(pool.workers)]
        self.names, self.limit_s = [f"{pool.name} rank {rank}" for pool, rank in places], 60.0
        self.number, (self.pool, self.rank) = number, places[number]
        self.order = RunOrder({}, True, None, family)

    def make_table(self, tokens: int, first: int, end: int, key: int) -> CallResult:
        """Make rows `first` to `end` of the table, and keep them."""
        rows = self.rows_by_key[key] = table(tokens).take(range(first, end))
        return CallResult(pack_rows(rows.index), tuple(rows.payload), self.number, key)


@dataclass(frozen=True)
class Held:
    """A table in the driver, split into equal parts."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def divide(self, parts: int) -> list[Rows]:
        share = len(self.rows) // parts
        return [self.rows.take(range(part * share, (part + 1) * share)) for part in range(parts)]


class Cluster(RayCluster):
    """Starts echo workers in place of hybrid ones."""

    def start(self, worker: type, place: Any, *arguments: Any, name: str | None = None) -> Any:
        return super().start(EchoWorker, place, *arguments, name=name)


class Lying:
    """A table held by the workers of a group; `call` echoes it from each worker to the next."""

    def __init__(self, group: WorkerGroup, tokens: int) -> None:
        self.group, self.keys, size = group, itertools.count(tokens), group.mesh.size
        share, key = DISPATCHED // size, next(self.keys)
        firsts = [share * rank for rank in range(size)]
        made = [
            group.send(rank, "make_table", (tokens, first, first + share, key)) for rank, first in enumerate(firsts)
        ]
        output = Output(READ)
        output.begin(key, group, made, [range(first, first + share) for first in firsts])
        output.finish(group.wait(made))
        before = [(rank - 1) % size * share for rank in range(size)]
        # Each rank gets the rows of the rank before it.
        parts = [range(first, first + share) for first in before]
        self.handle = Handle((output,), torch.arange(DISPATCHED)[None], parts)

    def call(self) -> None:
        key = next(self.keys)
        futures = self.group.call("execute", self.handle, ECHO, 0, key, reads=frozenset(COLUMNS))
        answers = self.group.wait(futures)
        assert sum(len(unpack_rows(answer.index)) for answer in answers) == DISPATCHED
        assert all(answer.columns == COLUMNS for answer in answers)
        for future in futures:
            self.group.forgotten.setdefault(future.worker - self.group.first, []).append(key)


def table(tokens: int) -> Rows:
    lengths, nothing = torch.full((DISPATCHED,), tokens), torch.zeros(DISPATCHED, dtype=torch.int64)
    columns = {name: Ragged.from_lengths(column.flatten(), lengths) for name, column in dispatched(tokens).items()}
    return Rows({"source": nothing, "group": torch.arange(DISPATCHED), "sample": nothing, "length": lengths, **columns})


def arrays(rows: Rows) -> list[Any]:
    """Return the codec's frames in a form that Ray passes on without copying them into a pickle."""
    return [np.frombuffer(frame, dtype=np.uint8) for frame in encode(rows)]


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    ray = import_ray()
    cluster = Cluster(ClusterConfig(cpus=sum(case["workers"])), "cpu")
    try:
        pools = [Pool((f"echo{size}",), size) for size in case["workers"]]
        groups, first = dict[int, WorkerGroup](), 0
        for pool, places in zip(pools, cluster.reserve(pools), strict=True):
            group = WorkerGroup(pool, places, first, cluster)
            groups[pool.workers], first = group, first + pool.workers
            group.start()
        for group in groups.values():
            ranks = enumerate(group.numbers)
            group.wait([group.send(rank, "take_place", (number, pools, cluster.family)) for rank, number in ranks])
        tables = {tokens: table(tokens) for tokens in TOKENS}
        sums = {tokens: read(rows[name].values for name in COLUMNS) for tokens, rows in tables.items()}
        lying = {(size, tokens): Lying(groups[size], tokens) for size in case["workers"] for tokens in TOKENS}

        def held(size: int, tokens: int) -> None:
            group = groups[size]
            protocol = PROTOCOLS.find("DP")
            calls = protocol.distribute(group.mesh, Held(tables[tokens]))
            refs = [group.actors[rank].echo.remote(arrays(call[0])) for rank, call in enumerate(calls) if call]
            parts = protocol.collect(group.mesh, calls, ray.get(refs))
            back = Rows.cat([decode([memoryview(frame) for frame in frames]) for frames in parts])
            assert read(back[name].values for name in COLUMNS) == sums[tokens]

        def turn() -> dict[str, float]:
            found = {}
            for size, tokens in lying:
                name = f"{size} workers, {tokens} tokens"
                found[f"{name}, held"] = timed(partial(held, size, tokens), repeats(tokens))
                found[f"{name}, handles"] = timed(lying[size, tokens].call, repeats(tokens))
            return found

        turn()
        channel.send({"ready": True})
        while channel.wait_for_turn():
            channel.report(turn())
    finally:
        cluster.close()

"""Braid's transfer queue: a worker writes its columns and says so, another takes what is ready; the queue is a third process."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks.tables import COLUMNS, QUEUED, queued, read, repeats
from benchmarks.turns import Channel
from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import encode
from braidrl.data.rows import Rows
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.stage import Signature
from braidrl.flow.updates import Sizes
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.stream import Stream
from braidrl.transfer.queue.client import Client
from braidrl.transfer.queue.owner import Owner
from braidrl.transfer.queue.storage import DataPlane
from braidrl.transfer.queue.storage_backends import Segments
from braidrl.transfer.queue.transport import QueueServer

ITERATIONS = 1_000_000
PUT = Stage("put", "put", None, Signature(Kind.GENERATE, ("prompt",), (*COLUMNS, "version")))
GET = Stage("get", "get", None, Signature(Kind.COMPUTE, COLUMNS, ("score",)))


def run(case: Mapping[str, Any], channel: Channel) -> None:
    torch.set_num_threads(case["threads"])
    context = multiprocessing.get_context("spawn")
    queues = {}
    try:
        for shape in QUEUED:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, shape[0]))
            process.start()
            queues[shape] = (process, ours, Passage(*ours.recv(), shape))
        for _, _, passage in queues.values():
            passage.once()
        channel.send({"ready": True})
        while channel.wait_for_turn():
            found = {}
            for (rows, tokens), (_, _, passage) in queues.items():
                times = [passage.once() for _ in range(repeats(tokens))]
                found[f"put {rows} rows"], found[f"get {rows} rows"] = map(median, zip(*times, strict=True))
            channel.report(found)
    finally:
        for process, ours, passage in queues.values():
            passage.close()
            ours.send("end")
            process.join()


def serve(pipe: Connection, rows: int) -> None:
    """A queue with batches of so many rows, and the main program's part: what is finished is let go."""
    torch.set_num_threads(1)
    owner = Owner()
    data = DataPlane(Segments(owner.run, "main"), "")
    control = ControlPlane(Stream(Flow("passage", [PUT, GET]), Sizes(ITERATIONS, rows, 1, rows)), data, 60.0)
    server = QueueServer(control.handle, control.tick)
    data.address = server.address
    pipe.send((server.address, owner.run))
    seen = -1
    try:
        while not pipe.poll():
            seen = control.wait(seen, 0.1)
            while control.finished:
                control.release(control.finished.popleft())
    finally:
        server.close()
        data.close()
        owner.close()


class Passage:
    """A writer and a reader of one table."""

    def __init__(self, address: str, run: str, shape: tuple[int, int]) -> None:
        self.writer, self.reader = (
            Client(address, name, DataPlane(Segments(run, f"{name}-{shape[0]}"), address))
            for name in ("writer", "reader")
        )
        self.rows, tokens = shape
        table = queued(*shape)
        lengths = torch.full((self.rows,), tokens)
        self.columns: dict[str, Any] = {name: Ragged.from_lengths(c.flatten(), lengths) for name, c in table.items()}
        self.columns["version"] = torch.zeros(self.rows, dtype=torch.int64)
        self.sums = read(table[name] for name in COLUMNS)
        self.batches = itertools.count()

    def once(self) -> tuple[float, float]:
        """Seconds of a put, and of a get that reads every byte."""
        uids = self.admit(next(self.batches) * self.rows)
        leases = self.leases(self.writer.take(["put"], self.rows, 60.0))
        start = time.perf_counter()
        assert not self.writer.done("put", leases, [self.writer.write(uids, self.columns)], {})
        put = time.perf_counter()
        work = self.reader.take(["get"], self.rows, 60.0)
        rows = work.rows()
        got = read(rows[name].values for name in COLUMNS)
        end = time.perf_counter()
        assert got == self.sums
        assert not self.reader.done("get", self.leases(work), [], {})
        return put - start, end - put

    def admit(self, first: int) -> list[tuple[int, int, int]]:
        groups = torch.arange(first, first + self.rows)
        nothing = torch.zeros(self.rows, dtype=torch.int64)
        rows = Rows(
            {
                "source": nothing,
                "group": groups,
                "sample": nothing,
                "prompt": Ragged(groups, torch.arange(self.rows + 1)),
            }
        )
        self.writer.ask(
            "admit", encode(rows.index), block=self.writer.data.write_rows(rows), columns=list(rows.payload)
        )
        return rows.uids()

    def leases(self, work: Any) -> list[int]:
        assert work.kind == "rows", work.kind
        assert sum(rows for _, rows in work.leases) == self.rows
        return [number for number, _ in work.leases]

    def close(self) -> None:
        self.writer.close()
        self.reader.close()

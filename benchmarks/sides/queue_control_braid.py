"""Cost of the queue's bookkeeping: take and done of one row with many in flight, and rows per second through one
process's socket.

in this process      take, done of one row ──▶ the schedule of a flow with 1,024 to 1,000,000 rows in work
over a socket        clients: take 32 rows, done ──▶ the process that serves the queue, by its CPU time
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from benchmarks.turns import Turn
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.batches import Sizes
from braidrl.queue.calls import Stop, TakeColumns
from braidrl.queue.client import Client
from braidrl.queue.transfer_queue import TransferQueue
from braidrl.runtimes.streaming.schedule import StreamSchedule

IN_WORK = (1_024, 8_192, 65_536, 1_000_000)
CLIENTS = (1, 16, 128)
LEASE = 32
ROWS = 16_384
"""Rows through the socket in one turn."""
PAIRS = 2_000
FLOW = Flow(
    "passage",
    [
        Stage("put", "put", None, kind=Kind.GENERATE, reads=("prompt",), writes=("tokens", "version")),
        Stage("get", "get", None, kind=Kind.COMPUTE, reads=("tokens",), writes=("score",)),
    ],
)


def prepare(case: Mapping[str, Any]) -> Turn:
    """Return a turn that takes some rows while many are in flight."""
    passages = {rows: of_one_row(rows) for rows in IN_WORK}

    def turn() -> Mapping[str, float]:
        found = {f"take and done, {rows} rows in work": passage() for rows, passage in passages.items()}
        for clients in CLIENTS:
            found[f"rows per second, {clients} clients"] = over_sockets(clients)
        return found

    return turn


def of_one_row(rows: int) -> Callable[[], float]:
    """Return a function that measures the seconds of take and done of one row; the mean of a few leaves the number in
    flight unchanged.
    """
    schedule = StreamSchedule(FLOW, Sizes(2, rows, 1, rows, max_staleness=1))
    schedule.admission.groups_wanted(0)
    schedule.admission.admit([(0, group, 0) for group in range(rows)])
    schedule.admission.close()
    schedule.admission.groups_wanted(0)
    taken = 0

    def measured() -> float:
        nonlocal taken
        pairs = min(PAIRS, rows // 16)
        assert taken + pairs <= rows, "every turn has rows of its own"
        # The thread's own CPU time: other load on the machine is not the queue's.
        start = time.thread_time()
        for _ in range(pairs):
            lease = schedule.take("put", "worker", 0.0, 60.0, 1)
            assert lease is not None
            done = schedule.tasks.complete(lease)
            schedule.done("put", done, dict.fromkeys(done, 0))
            schedule.admission.close()
            schedule.progress.due_publication()
        taken += pairs
        return (time.thread_time() - start) / pairs

    return measured


def over_sockets(clients: int) -> float:
    """Return rows per CPU second of the serving process.

    Clients, which are threads of up to 4 processes, take the rows under leases and complete them.
    """
    context, processes = multiprocessing.get_context("spawn"), min(clients, 4)
    with TransferQueue.serve({"train": ["x"]}) as queue:
        ready = context.Barrier(processes + 1)
        consumers = [
            context.Process(target=consume, args=(queue.address, clients // processes, ready)) for _ in range(processes)
        ]
        for consumer in consumers:
            consumer.start()
        ready.wait()
        before = time.process_time()
        queue.put({"x": torch.zeros(ROWS)}, rows=list(range(ROWS)))
        queue.finish()
        for consumer in consumers:
            consumer.join()
        assert queue.usage()["rows"] == 0
        return ROWS / (time.process_time() - before)


def consume(address: str, threads: int, ready: Barrier) -> None:
    """Run clients that take leases and complete them without reading the rows."""
    torch.set_num_threads(1)

    def client(number: int) -> None:
        with TransferQueue.connect(address, f"{multiprocessing.current_process().name}.{number}") as queue:
            worker = Client(queue.address, queue.holder, queue.data)
            connected.wait()
            while (work := worker.take(TakeColumns(["train"], LEASE), 1.0)).kind is not Stop:
                if work.has_rows:
                    worker.done("train", [(work.lease, None)])

    connected = threading.Barrier(threads + 1)
    workers = [threading.Thread(target=client, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    connected.wait()
    ready.wait()
    for worker in workers:
        worker.join()

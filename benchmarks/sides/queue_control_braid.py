"""What the queue's bookkeeping costs: take and done of one row among many in work, and rows per second through one process's socket.

in this process      take, done of one row ──▶ the schedule of a flow with 1,024 to 1,000,000 rows in work
over a socket        clients: take 32 rows, done ──▶ a controller process with one core
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.turns import Turn
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.stage import Signature
from braidrl.flow.updates import Sizes
from braidrl.transfer.queue.transfer_queue import TransferQueue
from braidrl.transfer.schedule import StreamSchedule

IN_WORK = (1_024, 8_192, 65_536, 1_000_000)
CLIENTS = (1, 16, 128)
LEASE = 32
ROWS = 16_384
"""Through the socket in one turn."""
PAIRS = 2_000
FLOW = Flow(
    "passage",
    [
        Stage("put", "put", None, Signature(Kind.GENERATE, ("prompt",), ("tokens", "version"))),
        Stage("get", "get", None, Signature(Kind.COMPUTE, ("tokens",), ("score",))),
    ],
)


def prepare(case: Mapping[str, Any]) -> Turn:
    """Rows in work, and a turn that takes some of them."""
    passages = {rows: of_one_row(rows) for rows in IN_WORK}

    def turn() -> Mapping[str, float]:
        found = {f"take and done, {rows} rows in work": passage() for rows, passage in passages.items()}
        return found | {f"rows per second, {clients} clients": over_sockets(clients) for clients in CLIENTS}

    return turn


def of_one_row(rows: int) -> Callable[[], float]:
    """Return what measures seconds of take and done of one row, on average over some that do not change how many are in work."""
    schedule = StreamSchedule(FLOW, Sizes(2, rows, 1, rows, max_staleness=1))
    schedule.groups_wanted(0)
    schedule.admit([(0, group, 0) for group in range(rows)])
    schedule.close()
    schedule.groups_wanted(0)
    taken = 0

    def measured() -> float:
        nonlocal taken
        pairs = min(PAIRS, rows // 16)
        assert taken + pairs <= rows, "every turn has rows of its own"
        # The thread's own time: what else the machine does is not the queue's.
        start = time.thread_time()
        for _ in range(pairs):
            lease = schedule.take("put", "worker", 0.0, 60.0, 1)
            assert lease is not None
            schedule.acknowledge(lease.number, 0.0, 0)
            schedule.close()
            schedule.due_publication()
        taken += pairs
        return (time.thread_time() - start) / pairs

    return measured


def over_sockets(clients: int) -> float:
    """Return rows per CPU second of the controller's process, which clients in threads of up to 4 processes take and are done with."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, clients))
    server.start()
    address, processes = ours.recv(), min(clients, 4)
    consumers = [context.Process(target=consume, args=(address, clients // processes)) for _ in range(processes)]
    for consumer in consumers:
        consumer.start()
    seconds: float = ours.recv()
    for consumer in consumers:
        consumer.join()
    ours.send("end")
    server.join()
    return ROWS / seconds


def serve(pipe: Connection, clients: int) -> None:
    """The controller: measures from when all clients wait and rows come in to the last acknowledgement."""
    torch.set_num_threads(1)
    with TransferQueue.serve({"train": ["x"]}) as queue:
        controller = queue.controller
        assert controller is not None
        pipe.send(queue.address)
        while len(controller.holders) <= clients:
            time.sleep(0.01)
        # The process's own time: one core's, whatever else the machine does.
        start = time.process_time()
        queue.put({"x": torch.zeros(ROWS)}, rows=list(range(ROWS)))
        queue.finish()
        while controller.tasks.rows:
            time.sleep(0.01)
        pipe.send(time.process_time() - start)
        pipe.recv()


def consume(address: str, threads: int) -> None:
    """Clients that take leases and are done with them, without reading what is in them."""
    torch.set_num_threads(1)

    def client() -> None:
        with TransferQueue.connect(address) as queue:
            while (work := queue.client.take(["train"], LEASE, 1.0)).kind != "stop":
                if work.kind == "rows":
                    queue.client.done("train", [number for number, _ in work.leases], [], {})

    workers = [threading.Thread(target=client) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

"""The transfer queue for any program: one process serves it, any number of others put columns and take rows.

queue = TransferQueue.serve({"train": ["tokens", "reward"]})      # in one process; tell the others queue.address
queue.put({"tokens": tokens, "reward": reward}, rows=[0, 1, 2])   # anybody; columns may come one by one, in any order
queue.finish()

queue = TransferQueue.connect(address)                            # in another
for batch in queue.stream("train", rows=32):                      # done with a batch when the next one is asked for
    train(batch["tokens"], batch["reward"])
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from braidrl.data.codec import encode
from braidrl.data.rows import Rows
from braidrl.transfer.queue.client import Client, assembled
from braidrl.transfer.queue.columns import Batch, as_rows
from braidrl.transfer.queue.controller import QueueController
from braidrl.transfer.queue.owner import Owner, StorageNode
from braidrl.transfer.queue.samplers import sampler_named
from braidrl.transfer.queue.storage import DataPlane, Place
from braidrl.transfer.queue.storage_backends import open_storage
from braidrl.transfer.queue.table import StoredPart
from braidrl.transfer.queue.transport import Connection, QueueServer

LOOPBACK = "127.0.0.1"
ASK_AGAIN_S = 5.0
"""How long one request for rows waits at the server; who waits longer asks again, and so is known to live."""


class QueueFull(TimeoutError):
    """A put found no room within its limit; the text says who holds the rows that are in the way."""


class TransferQueue:
    """One process's view of a queue. May be used by several threads."""

    def __init__(self, client: Client, resources: ExitStack, controller: QueueController | None = None) -> None:
        """Use `serve` or `connect`; `resources` is closed with this object."""
        self.client, self.controller, self._resources = client, controller, resources

    @classmethod
    def serve(
        cls, tasks: Mapping[str, Collection[str]], *, samplers: Mapping[str, str] | None = None, lease_s: float = 60.0,
        budget_bytes: int | None = None, ip: str = LOOPBACK, storage: str = "shared_memory",
    ) -> TransferQueue:  # fmt: skip
        """Start a queue in this process, which must live as long as anybody uses it.

        Args:
            tasks: for each consuming task the columns that a row must have before it is given to it.
            samplers: for each task the sampler by name, `module:function` or `path.py:function`; the oldest rows first by default.
            lease_s: seconds without a sign of life after which a consumer's rows are given to another.
            budget_bytes: payload that may lie in the queue; a put waits until there is room. None is as much as there is memory.
            ip: the address to listen on; other machines reach any but the loopback.
            storage: where payload lies: `shared_memory`, `file:/path` or `redis://host:port/0`.
        """
        with ExitStack() as resources:
            owner = Owner(storage=storage)
            resources.callback(owner.close)
            data = DataPlane(open_storage(storage, owner.run, "server"), "", node_name())
            resources.callback(data.close)
            chosen = {name: sampler_named((samplers or {}).get(name, "first_in")) for name in tasks}
            controller = QueueController(tasks, data, lease_s, chosen, budget_bytes)
            server = QueueServer(controller.handle, controller.tick, f"tcp://{ip}:*")
            resources.callback(server.close)
            data.address = server.address
            controller.place = Place(data.host, owner.run, server.address, storage)
            client = Client(server.address, "owner", DataPlane.at(controller.place, "owner"))
            resources.callback(client.close)
            return cls(client, resources.pop_all(), controller)

    @classmethod
    def connect(cls, address: str, name: str | None = None, ip: str = LOOPBACK, limit_s: float = 60.0) -> TransferQueue:
        """Join a queue that another process serves.

        Args:
            address: what the serving process's `address` says.
            name: of this process, for messages; by default machine and process number.
            ip: where others reach this machine, if it is not the server's.
            limit_s: seconds to wait for an answer.

        Raises:
            QueueTimeout: no queue answers at the address.
        """
        holder = name or f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        with ExitStack() as resources:
            connection = Connection(address, limit_s)
            resources.callback(connection.close)
            place = Place(*connection.ask({"request": "place"})[0]["place"])
            if place.host != node_name():
                node = StorageNode(node_name(), ip)
                resources.callback(node.close)
                place = node.place()
            client = Client(address, holder, DataPlane.at(place, holder), limit_s)
            resources.callback(client.close)
            return cls(client, resources.pop_all())

    @property
    def address(self) -> str:
        """Return what others connect to."""
        return self.client.address

    def put(
        self,
        columns: Any,
        rows: Sequence[Any],
        *,
        table: Any = 0,
        groups: Sequence[Any] | None = None,
        wait_s: float = 60.0,
    ) -> None:
        """Put columns of rows into the queue.

        Args:
            columns: by name, each with a value for every row: numpy, torch, lists, or one TensorDict.
            rows: their names, numbers or strings or tuples of these; a row is born with its first column.
            table: which table rows that are new belong to, as a step or a source; tasks take from the first one that has rows.
            groups: which group each row belongs to, for samplers that look at groups.
            wait_s: seconds to wait for room.

        Raises:
            QueueFull: there was no room in time.
            QueueError: a row has one of the columns already.
        """
        content = as_rows(columns)
        if len(content) != len(rows):
            raise ValueError(f"{len(rows)} rows are named and the columns have {len(content)}")
        frames = encode(content)
        size = sum(memoryview(frame).nbytes for frame in frames)
        self._reserve(size, wait_s)
        block = self.client.data.write(frames)
        lengths = next(
            (column.lengths.tolist() for _, column in content.payload.items() if hasattr(column, "lengths")), None
        )
        self.client.ask(
            "put", rows=list(rows), columns=list(content), block=block, table=table, lengths=lengths,
            groups=None if groups is None else list(groups),
        )  # fmt: skip

    def get(
        self, task: str, rows: int, *, columns: Sequence[str] | None = None, table: Any = None, ranks: int = 1,
        wait_s: float = 60.0,
    ) -> Batch | None:  # fmt: skip
        """Return rows that are ready for a task, under a lease; None when no more will come.

        Args:
            task: who consumes them.
            rows: at most.
            columns: those to read; by default what the task waits for.
            table: where to take from; by default the first that has ready rows.
            ranks: the processes that will share them, for samplers.
            wait_s: seconds to wait for the first of them.

        Raises:
            TimeoutError: nothing was ready in time.
        """
        until = time.monotonic() + wait_s
        while True:
            left = max(0.0, until - time.monotonic())
            work = self.client.take([task], rows, min(left, ASK_AGAIN_S), ranks=ranks, columns=columns, table=table)
            if work.kind == "stop":
                return None
            if work.kind == "rows":
                names = [tuple(row) if isinstance(row, list) else row for row in work.message["rows"]]
                read = assembled(self.client.data, Rows({}), work.message["payload"], range(len(names)))
                return Batch(names, read, task, [number for number, _ in work.leases])
            if not left:
                raise TimeoutError(f"no row was ready for task {task} within {wait_s:g} s")

    def done(self, batch: Batch, columns: Any = None) -> list[int]:
        """Say that a batch's rows are done; those that every task is done with leave.

        Args:
            batch: what `get` returned.
            columns: further columns for these rows, as for `put`.

        Returns:
            The leases that were lost: their rows are somebody else's by now, and what was written for them is not kept.
        """
        written = []
        if columns is not None:
            content, places = as_rows(columns), {row: place for place, row in enumerate(batch.rows)}
            block = self.client.data.write(encode(content))
            written = [StoredPart("", Rows({}), block, tuple(content), len(places), places)]
        return self.client.done(batch.task, batch.leases, written, {})

    def stream(self, task: str, rows: int, **options: Any) -> Iterator[Batch]:
        """Yield batches until no more rows will come, as `get` with the same options; each is done when the next is asked for."""
        while (batch := self.get(task, rows, **options)) is not None:
            yield batch
            self.done(batch)

    def clear(self, rows: Sequence[Any] | None = None, table: Any = None) -> None:
        """Let rows leave, done or not: those named, those of a table, or all."""
        self.client.ask("clear", rows=None if rows is None else list(rows), table=table)

    def finish(self) -> None:
        """Say that no more rows will come: whoever waits for some ends when those that are there are done."""
        self.client.ask("finish")

    def renew(self) -> list[int]:
        """Say that this process is alive and slow; return the leases that were lost nevertheless."""
        return self.client.renew()

    def usage(self) -> dict[str, Any]:
        """Return bytes and rows in the queue, rows that each task is not done with, and who holds how many of them."""
        return self.client.ask("usage")[0]

    async def put_async(self, columns: Any, rows: Sequence[Any], **options: Any) -> None:
        """Do as `put` without blocking the event loop."""
        await asyncio.to_thread(self.put, columns, rows, **options)

    async def get_async(self, task: str, rows: int, **options: Any) -> Batch | None:
        """Do as `get` without blocking the event loop."""
        return await asyncio.to_thread(self.get, task, rows, **options)

    async def stream_async(self, task: str, rows: int, **options: Any) -> AsyncIterator[Batch]:
        """Do as `stream` without blocking the event loop."""
        while (batch := await self.get_async(task, rows, **options)) is not None:
            yield batch
            await asyncio.to_thread(self.done, batch)

    def close(self) -> None:
        """Leave the queue; the serving process ends it, and frees all of its memory."""
        self._resources.close()

    def __enter__(self) -> TransferQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, size: int, wait_s: float) -> None:
        if self.client.ask("reserve", wait_s=wait_s, bytes=size)[0].get("waited"):
            raise QueueFull(f"{size} bytes found no room within {wait_s:g} s: {described(self.usage())}")


def described(usage: Mapping[str, Any]) -> str:
    """Return in one line who keeps rows in the queue."""
    held: dict[str, list[str]] = {}
    for task, holder, rows in usage["held"]:
        held.setdefault(task, []).append(f"{holder} holds {rows}")
    tasks = [
        f"task {task} has {left} rows to do ({', '.join(held.get(task, ['nobody holds any']))})"
        for task, left in usage["undone"].items()
        if left
    ]
    return f"{usage['bytes']} bytes are in the queue; {'; '.join(tasks)}"


def node_name() -> str:
    """Return what processes that share memory have in common: the machine since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text().strip()[:8] if boot.exists() else ''}"

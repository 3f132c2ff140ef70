"""The transfer queue for any program: one process serves it, any number of others put columns and take rows.

queue = TransferQueue.serve({"train": ["tokens", "reward"]})      # in one process; pass queue.address to the others
queue.put({"tokens": tokens, "reward": reward}, rows=[0, 1, 2])   # any process; columns may come one by one, in any order
queue.finish()

queue = TransferQueue.connect(address)                            # in another process
for batch in queue.stream("train", rows=32):                      # a batch is acknowledged by the request for the next one
    train(batch["tokens"], batch["reward"])
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import encode
from braidrl.data.frames import Frame
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.queue.client import Client, WorkItem, assembled
from braidrl.queue.columns import Batch, as_rows
from braidrl.queue.owner import StorageNode
from braidrl.queue.samplers import sampler_named
from braidrl.queue.service import Service
from braidrl.queue.storage import DataPlane, Evicted, Place
from braidrl.queue.storage_backends import data_plane
from braidrl.queue.table import home, row_name
from braidrl.queue.transport import Connection, QueueTimeout

LOOPBACK = "127.0.0.1"
ASK_AGAIN_S = 5.0
"""Longest wait of one request for rows at the server; a longer wait repeats it, which serves as a heartbeat."""


class QueueFull(TimeoutError):
    """Raised by a put without room within its limit; the text names the holders of the blocking rows."""


class TransferQueue:
    """One process's view of a queue. Thread-safe."""

    def __init__(
        self, address: str, holder: str, directory: Mapping[str, Any], data: DataPlane, resources: ExitStack
    ) -> None:
        """Store a connection; use `serve` or `connect`.

        Args:
            address: Address of the serving process.
            holder: This process's name at the queue.
            directory: Addresses of units and tasks.
            data: This process's view of payload.
            resources: Closed with this object.
        """
        self.address, self.holder, self.data = address, holder, data
        self.units, self.tasks = directory["units"], directory["tasks"]
        self._has_budget, self._resources = directory["budget"], resources
        self._clients: dict[str, Client] = {}
        self.service: Service | None = None
        """The queue's processes, in the serving process."""

    @classmethod
    def serve(
        cls, tasks: Mapping[str, Collection[str]], *, samplers: Mapping[str, str] | None = None, lease_s: float = 60.0,
        budget_bytes: int | None = None, ip: str = LOOPBACK, storage: str = "shared_memory", units: int = 1,
        secret: str | None = None,
    ) -> "TransferQueue":  # fmt: skip
        """Start a queue; its processes end with this one.

        Args:
            tasks: By consuming task the columns that a row needs before it is ready.
            samplers: By task a sampler's name, `module:function` or `path.py:function`; the oldest rows first by default.
            lease_s: Seconds without a heartbeat after which a consumer's rows go to another.
            budget_bytes: Limit of payload in the queue; a put waits for room. None is no limit but memory.
            ip: Address to listen on; other machines reach any but the loopback.
            storage: Place of payload: `shared_memory`, `file:/path` or `redis://host:port/0`.
            units: Number of storage units, which share the rows.
            secret: Needed by every client, and encrypts all traffic. Required off the loopback.

        Raises:
            UserError: A sampler or storage is unknown, or the secret is missing on a public address.
        """
        chosen = dict(samplers or {})
        for name in chosen.values():
            sampler_named(name)
        if ip != LOOPBACK and secret is None:
            raise UserError(f"a queue at {ip} can be reached by others: write serve(ip=..., secret=...)")
        with ExitStack() as resources:
            node = StorageNode(node_name(), ip, secret, storage)
            resources.callback(node.close)
            service = Service(tasks, chosen, lease_s, budget_bytes, units, node.place(), ip, secret)
            resources.callback(service.close)
            data = data_plane(node.place(), "owner", secret=secret)
            resources.callback(data.close)
            queue = cls(service.server.address, "owner", service.directory, data, resources.pop_all())
            queue.service = service
            return queue

    @classmethod
    def connect(
        cls, address: str, name: str | None = None, ip: str = LOOPBACK, limit_s: float = 60.0, secret: str | None = None
    ) -> "TransferQueue":
        """Connect to a queue of another process.

        Args:
            address: The serving process's `address`.
            name: Name of this process in messages; by default machine and process number.
            ip: Address of this machine for others, if it is not the server's.
            limit_s: Seconds to wait for an answer.
            secret: The queue's secret, if it has one.

        Raises:
            QueueTimeout: No queue answers at the address, or it has another secret.
        """
        holder = name or f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        with ExitStack() as resources:
            connection = Connection(address, limit_s, secret)
            resources.callback(connection.close)
            directory = connection.ask({"request": "directory"})[0]
            place = Place(*directory["place"])
            if place.host != node_name():
                node = StorageNode(node_name(), ip, secret)
                resources.callback(node.close)
                place = node.place()
            data = data_plane(place, holder, limit_s, secret)
            resources.callback(data.close)
            return cls(address, holder, directory, data, resources.pop_all())

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
            columns: By name, each with a value for every row: numpy, torch, lists, or one TensorDict.
            rows: Names of rows: numbers or strings or tuples of these. The first column of a row admits it.
            table: Table of new rows, such as a step or a source; tasks take from the first one that has rows.
            groups: Group of each row, for samplers of groups.
            wait_s: Seconds to wait for room.

        Raises:
            QueueFull: There was no room in time.
            QueueError: A row has one of the columns already, or a process of the queue ends repeatedly.
        """
        content = as_rows(columns)
        if len(content) != len(rows):
            raise ValueError(f"{len(rows)} rows are named and the columns have {len(content)}")
        lengths = next(
            (column.lengths.tolist() for _, column in content.payload.items() if isinstance(column, Ragged)), None
        )
        for unit, places in self._shares(rows):
            share = content if len(places) == len(rows) else content.take(places)
            frames = encode(share)
            size = sum(memoryview(frame).nbytes for frame in frames)
            if self._has_budget and self._ask(unit, "reserve", wait_s, bytes=size).get("waited"):
                raise QueueFull(f"{size} bytes found no room within {wait_s:g} s: {described(self.usage())}")
            part = self._written(frames, share, [rows[place] for place in places])
            self._ask(
                unit, "put", **part, table=table, by="", lengths=chosen(lengths, places), groups=chosen(groups, places)
            )

    def get(
        self, task: str, rows: int, *, columns: Sequence[str] | None = None, table: Any = None, ranks: int = 1,
        wait_s: float = 60.0,
    ) -> Batch | None:  # fmt: skip
        """Return ready rows for a task, under a lease; None when no more will come.

        Args:
            task: Name of the consuming task.
            rows: Limit of rows.
            columns: Columns to read; by default those that the task waits for.
            table: Table to take from; by default the first with ready rows.
            ranks: Processes that will share them, for samplers.
            wait_s: Seconds to wait for the first row.

        Raises:
            TimeoutError: No row was ready in time.
        """
        client, until = self._client(task), time.monotonic() + wait_s
        while True:
            left = max(0.0, until - time.monotonic())
            with self._explained():
                work = client.take([task], rows, min(left, ASK_AGAIN_S), ranks, columns=columns, table=table)
            if work.kind == "stop":
                return None
            if work.kind == "rows" and (batch := self._read(client, work)) is not None:
                return batch
            if not left:
                raise TimeoutError(f"no row was ready for task {task} within {wait_s:g} s")

    def done(self, batch: Batch, columns: Any = None) -> list[int]:
        """Acknowledge a batch; rows that every task has completed are removed.

        Args:
            batch: A result of `get`.
            columns: Further columns for these rows, as for `put`.

        Returns:
            The lost leases: another consumer has their rows, and the columns written for them are discarded.
        """
        parts = []
        if columns is not None:
            content = as_rows(columns)
            for _, places in self._shares(batch.rows):
                share = content if len(places) == len(batch.rows) else content.take(places)
                parts.append(self._written(encode(share), share, [batch.rows[place] for place in places]))
        client = self._client(batch.task)
        with self._explained():
            lost: list[int] = client.ask("done", leases=batch.leases, parts=parts)[0]["lost"]
        client.forget_leases(batch.leases)
        if lost:
            self.data.free([part["block"] for part in parts])
        return lost

    def stream(self, task: str, rows: int, **options: Any) -> Iterator[Batch]:
        """Yield batches until no more rows will come; the request for the next one acknowledges the previous.

        Args:
            task: Name of the consuming task.
            rows: Limit of rows per batch.
            options: Further arguments of `get`.
        """
        while (batch := self.get(task, rows, **options)) is not None:
            yield batch
            self.done(batch)

    def clear(self, rows: Sequence[Any] | None = None, table: Any = None) -> None:
        """Remove rows, completed or not.

        Args:
            rows: Their names; None is all.
            table: Table to remove from; None is every table.
        """
        for unit in range(len(self.units)):
            self._ask(unit, "clear", rows=None if rows is None else list(rows), table=table)

    def finish(self) -> None:
        """Declare that no more rows will come: consumers end when the remaining rows are done."""
        for unit in range(len(self.units)):
            self._ask(unit, "finish")

    def renew(self) -> list[int]:
        """Send a heartbeat of this slow process; return the leases that were lost nevertheless."""
        return [lease for client in list(self._clients.values()) for lease in client.renew()[0]]

    def usage(self) -> dict[str, Any]:
        """Return bytes and rows in the queue, remaining rows by task, and rows by holder."""
        units = [self._ask(unit, "usage") for unit in range(len(self.units))]
        tasks = {name: self._client(name).ask("usage")[0] for name in self.tasks}
        return {
            "bytes": sum(unit["bytes"] for unit in units), "rows": sum(unit["rows"] for unit in units),
            "undone": {name: found["undone"] for name, found in tasks.items()},
            "held": [[name, *held] for name, found in tasks.items() for held in found["held"]],
        }  # fmt: skip

    def lost(self) -> dict[Any, list[str]]:
        """Return by row the columns with lost payload, and the machine or file that held it; they may be put again."""
        units = [self._ask(unit, "usage") for unit in range(len(self.units))]
        return {row_name(row): columns for unit in units for row, columns in unit["lost"]}

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

    def __enter__(self) -> "TransferQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _client(self, task: str) -> Client:
        if task not in self.tasks:
            raise ValueError(f"there is no task {task!r} among {', '.join(self.tasks)}")
        if task not in self._clients:
            self._clients[task] = Client(self.tasks[task], self.holder, self.data)
        return self._clients[task]

    def _ask(self, unit: int, request: str, wait_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        message = {"request": request, "holder": self.holder, "wait_s": wait_s, **fields}
        with self._explained():
            return self.data.connections.ask(self.units[unit], message, wait_s=wait_s)[0]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Guard requests: if a process of the queue does not answer, the serving process may know why it cannot live."""
        try:
            yield
        except QueueTimeout:
            self.data.connections.ask(self.address, {"request": "directory"})
            raise

    def _shares(self, rows: Sequence[Any]) -> list[tuple[int, list[int]]]:
        """Return each unit with the positions of its rows."""
        shares: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            shares.setdefault(home(row, len(self.units)), []).append(place)
        return list(shares.items())

    def _written(self, frames: Sequence[Frame], columns: Rows, rows: Sequence[Any]) -> dict[str, Any]:
        """Put payload into storage; return its description for the queue."""
        block = self.data.write(frames)
        return {"rows": rows, "places": None, "columns": list(columns), "block": block, "size": len(rows)}

    def _read(self, client: Client, work: WorkItem) -> Batch | None:
        """Return the rows of a lease; None if their payload is gone, which is reported to the queue."""
        names, leases = [row_name(row) for row in work.message["rows"]], [work.lease]
        try:
            read = assembled(self.data, Rows({}), work.message["payload"], len(names))
        except (Evicted, QueueTimeout):
            for unit in range(len(self.units)):
                self._ask(unit, "missing", blocks=[piece["block"] for piece in work.message["payload"]])
            client.ask("give_back", leases=leases)
            client.forget_leases(leases)
            return None
        return Batch(names, read, work.consumer, leases)


def chosen(values: Sequence[Any] | None, places: Sequence[int]) -> list[Any] | None:
    """Return the values at some positions, or None without values."""
    return None if values is None else [values[place] for place in places]


def described(usage: Mapping[str, Any]) -> str:
    """Describe in one line which holders keep rows in the queue."""
    held: dict[str, list[str]] = {}
    for task, holder, rows in usage["held"]:
        held.setdefault(task, []).append(f"{holder} holds {rows}")
    tasks = [
        f"task {task} has {left} rows to do ({', '.join(held.get(task, ['no holder']))})"
        for task, left in usage["undone"].items()
        if left
    ]
    return f"{usage['bytes']} bytes are in the queue; {'; '.join(tasks)}"


def node_name() -> str:
    """Return a name shared by all processes that share memory: the machine since its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}-{boot.read_text().strip()[:8] if boot.exists() else ''}"

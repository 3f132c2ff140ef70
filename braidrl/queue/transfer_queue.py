"""The transfer queue for any program: one process serves it, any number of others put columns and take rows.

queue = TransferQueue.serve({"train": ["tokens", "reward"]})      # in one process; pass queue.address to the others
queue.put({"tokens": tokens, "reward": reward}, rows=[0, 1, 2])   # any process; columns may come one by one, in any
                                                                  order
queue.finish()

queue = TransferQueue.connect(address)                            # in another process
for batch in queue.stream("train", rows=32):                      # a batch is acknowledged by the request for the next
                                                                  one
    train(batch["tokens"], batch["reward"])

Columns of any kind are converted to the queue's form, and back:

Tensor (B, ...), array                          ──▶ Tensor       one value, or one shape, per row
jagged nested tensor, list of 1-d tensors       ──▶ Ragged       a different number of values per row
list of JSON values                             ──▶ Objects
"""

import asyncio
import atexit
import os
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.process import LOOPBACK
from braidrl.cluster.shared_memory import machine
from braidrl.data.codec import encode
from braidrl.data.messages import Frame
from braidrl.data.rows import Column, Objects, Rows
from braidrl.errors import UserError
from braidrl.queue.calls import (
    AskDirectory,
    Clear,
    ColumnRequest,
    Directory,
    Finish,
    GiveBack,
    LeasedColumns,
    Missing,
    Put,
    QueueUsage,
    Reserve,
    Stop,
    TakeColumns,
    Usage,
    Waited,
)
from braidrl.queue.client import Client, DataPlane, Evicted, assembled
from braidrl.queue.controller import ColumnController
from braidrl.queue.owner import StorageNode
from braidrl.queue.samplers import FIRST_IN, sampler_named
from braidrl.queue.table import Positions, StoredRows
from braidrl.queue.transport import Connection, QueueServer, QueueTimeout

ASK_AGAIN_S = 5.0
"""Longest wait of one request for rows at the server; a longer wait repeats it, which serves as a heartbeat."""


class QueueFull(TimeoutError):
    """Raised by a put that finds no room within its limit; the text names the holders of the blocking rows."""


class Batch(Mapping[str, Any]):
    """Leased rows: their names, and columns as tensors, ragged columns or lists."""

    def __init__(self, rows: Sequence[Any], columns: Rows, task: str, leases: Sequence[int]) -> None:
        """Store `columns` of the rows with these names; `leases` hold them for the task."""
        self.rows, self.columns, self.task, self.leases = list(rows), columns, task, list(leases)

    def __getitem__(self, name: str) -> Any:
        column = self.columns[name]
        return list(column.values) if isinstance(column, Objects) else column

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(list(self.columns))

    def torch(self) -> dict[str, Any]:
        """Return tensors, and lists of tensors for ragged columns.

        They may be in shared memory and must not be written to.
        """
        return {name: column.unbind() if isinstance(column, Ragged) else column for name, column in self.items()}

    def numpy(self) -> dict[str, Any]:
        """Return arrays on the same memory; bfloat16, which numpy lacks, becomes float32."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(item) for item in value]
            if not isinstance(value, Tensor):
                return value
            return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

        return {name: plain(column) for name, column in self.torch().items()}

    def tensordict(self) -> Any:
        """Return a TensorDict, with jagged nested tensors for ragged columns. Needs the package tensordict."""
        from tensordict import NonTensorStack, TensorDict

        columns = {}
        for name, column in self.items():
            if isinstance(column, Ragged):
                column = torch.nested.nested_tensor_from_jagged(column.values.clone(), column.offsets.clone())
            columns[name] = NonTensorStack(*column) if isinstance(column, list) else column
        return TensorDict(columns, batch_size=[len(self.rows)])


def as_rows(columns: Any) -> Rows:
    """Convert columns by name, a mapping or a TensorDict, to rows.

    Raises ValueError if their numbers of rows differ.
    """
    return Rows({str(name): as_column(value) for name, value in columns.items()})


def as_column(value: Any) -> Column:
    """Convert one column of any supported type."""
    if isinstance(value, Ragged | Objects):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor) and not value.is_nested:
        return value.detach().cpu()
    rows = list(value.unbind() if isinstance(value, Tensor) else value)
    if isinstance(value, Tensor) or (rows and all(isinstance(r, Tensor | np.ndarray) and r.ndim == 1 for r in rows)):
        tensors = [torch.as_tensor(row).detach().cpu() for row in rows]
        return Ragged.from_lengths(torch.cat(tensors), torch.tensor([len(row) for row in tensors]))
    if rows and all(isinstance(row, bool | int | float) for row in rows):
        return torch.tensor(rows)
    return Objects(tuple(rows))


class TransferQueue(AbstractContextManager["TransferQueue"]):
    """A process's view of a queue. Thread-safe."""

    def __init__(self, address: str, holder: str, directory: Directory, data: DataPlane, resources: ExitStack) -> None:
        """Register at the queue; use `serve` or `connect`.

        Args:
            address: Address of the queue.
            holder: This process's name at the queue.
            directory: The queue's answer to `directory`.
            data: This process's view of payload.
            resources: Closed with this object.
        """
        self.address, self.holder, self.data, self._resources = address, holder, data, resources
        self.tasks, self._has_budget = directory.tasks, directory.has_budget
        self._client = Client(address, holder, data)

    @classmethod
    def serve(
        cls,
        tasks: Mapping[str, Collection[str]],
        *,
        samplers: Mapping[str, str] | None = None,
        lease_s: float = 60.0,
        budget_bytes: int | None = None,
        ip: str = LOOPBACK,
        storage: str = "shared_memory",
        secret: str | None = None,
    ) -> "TransferQueue":
        """Serve a queue from a thread of this process.

        Args:
            tasks: By consuming task the columns that a row needs before it is ready.
            samplers: By task a sampler's name, `module:function` or `path.py:function`; the oldest rows first by
                default.
            lease_s: Seconds without a heartbeat after which a consumer's rows go to another.
            budget_bytes: Limit of payload in the queue; a put waits for room. None is no limit but memory.
            ip: Address to listen on; other machines reach any but the loopback.
            storage: Place of payload: `shared_memory`, `file:/path` or `redis://host:port/0`.
            secret: Needed by every client, and encrypts all traffic. Required off the loopback.

        Raises:
            UserError: A sampler or storage is unknown, or the secret is missing on a public address.
        """
        chosen = {task: sampler_named((samplers or {}).get(task, FIRST_IN.name)) for task in tasks}
        if ip != LOOPBACK and secret is None:
            raise UserError(f"a queue at {ip} can be reached by others: write serve(ip=..., secret=...)")
        with ExitStack() as resources:
            node = StorageNode(machine(), ip, secret, storage)
            resources.callback(node.close)
            controller = ColumnController(tasks, chosen, node.data, node.place(), lease_s, budget_bytes)
            server = QueueServer(controller.handle, ColumnRequest, controller.tick, f"tcp://{ip}:*", secret)
            resources.callback(server.close)
            data = DataPlane(node.place(), "owner", secret=secret)
            resources.callback(data.close)
            queue = cls(server.address, "owner", controller.directory(), data, resources.pop_all())
            # A program that forgets to close the queue would leave its memory.
            atexit.register(queue.close)
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
            directory: Directory = connection.ask(AskDirectory())[0]
            location = directory.place
            if location.host != machine():
                node = StorageNode(machine(), ip, secret)
                resources.callback(node.close)
                location = node.place()
            data = DataPlane(location, holder, limit_s, secret)
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
            QueueError: A row has one of the columns already.
        """
        content = as_rows(columns)
        if len(content) != len(rows):
            raise ValueError(f"{len(rows)} rows are named and the columns have {len(content)}")
        ragged = (column.lengths.tolist() for _, column in content.payload.items() if isinstance(column, Ragged))
        lengths = next(ragged, None)
        frames = encode(content)
        size = sum(memoryview(frame).nbytes for frame in frames)
        if self._has_budget and isinstance(self._client.ask(Reserve(size), wait_s=wait_s)[0], Waited):
            usage, holders_of = self._usage(), dict[str, list[str]]()
            for task, holder, number in usage.held:
                holders_of.setdefault(task, []).append(f"{holder} holds {number}")
            tasks = [
                f"task {task} has {left} rows to do ({', '.join(holders_of.get(task, ['no holder']))})"
                for task, left in usage.undone.items()
                if left
            ]
            raise QueueFull(
                f"{size} bytes found no room within {wait_s:g} s: {usage.bytes} bytes are in the queue; "
                f"{'; '.join(tasks)}"
            )
        part = StoredRows.of_block(Rows({}), self.data.write(frames), list(content), len(content))
        described: list[Frame] = []
        message = part.message(described)
        self._client.ask(Put(message, list(rows), table, list(groups) if groups else None, lengths), described)

    def get(
        self,
        task: str,
        rows: int,
        *,
        columns: Sequence[str] | None = None,
        table: Any = None,
        ranks: int = 1,
        wait_s: float = 60.0,
    ) -> Batch | None:
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
        if task not in self.tasks:
            raise ValueError(f"there is no task {task!r} among {', '.join(self.tasks)}")
        until = time.monotonic() + wait_s
        while True:
            left = max(0.0, until - time.monotonic())
            request = TakeColumns([task], rows, ranks, columns=None if columns is None else list(columns), table=table)
            answer = self._client.take(request, min(left, ASK_AGAIN_S)).answer
            if isinstance(answer, Stop):
                return None
            if isinstance(answer, LeasedColumns):
                try:
                    read = assembled(self.data, Rows({}), answer.payload, len(answer.rows))
                    return Batch(answer.rows, read, task, [answer.lease])
                except (Evicted, QueueTimeout):
                    # The payload is missing.
                    self._client.ask(Missing([piece.block for piece in answer.payload if piece.block is not None]))
                    self._client.ask(GiveBack([answer.lease]))
                    self._client.held.discard(answer.lease)
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
        written: list[tuple[StoredRows, Positions]] = []
        if columns is not None:
            content = as_rows(columns)
            part = StoredRows.of_block(Rows({}), self.data.write(encode(content)), list(content), len(content))
            written.append((part, [(lease, list(range(len(batch.rows)))) for lease in batch.leases]))
        return self._client.done(batch.task, [(lease, None) for lease in batch.leases], written)

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
        self._client.ask(Clear(None if rows is None else list(rows), table))

    def finish(self) -> None:
        """Declare that no more rows will come: consumers end after the remaining rows."""
        self._client.ask(Finish())

    def renew(self) -> list[int]:
        """Send a heartbeat while processing slowly; return the leases lost nevertheless."""
        return list(self._client.renew().lost)

    def usage(self) -> dict[str, Any]:
        """Return bytes and rows in the queue, remaining rows by task, and rows by holder."""
        usage = self._usage()
        return {"bytes": usage.bytes, "rows": usage.rows, "undone": usage.undone, "held": usage.held}

    def lost(self) -> dict[Any, list[str]]:
        """Return the columns with lost payload by row; they may be put again."""
        return dict(self._usage().lost)

    def _usage(self) -> QueueUsage:
        usage: QueueUsage = self._client.ask(Usage())[0]
        return usage

    async def put_async(self, columns: Any, rows: Sequence[Any], **options: Any) -> None:
        """Call `put` without blocking the event loop."""
        await asyncio.to_thread(self.put, columns, rows, **options)

    async def get_async(self, task: str, rows: int, **options: Any) -> Batch | None:
        """Call `get` without blocking the event loop."""
        return await asyncio.to_thread(self.get, task, rows, **options)

    async def stream_async(self, task: str, rows: int, **options: Any) -> AsyncIterator[Batch]:
        """Call `stream` without blocking the event loop."""
        while (batch := await self.get_async(task, rows, **options)) is not None:
            yield batch
            await asyncio.to_thread(self.done, batch)

    def close(self) -> None:
        """Leave the queue; in the serving process also end the queue and free its memory."""
        atexit.unregister(self.close)
        self._resources.close()

    def __exit__(self, *_: object) -> None:
        self.close()

"""A worker's side of the queue: take ready rows, read them as views, write columns, report them as done.

while not isinstance((work := client.take(Take(["reference.log_probs"], most=64), wait_s=5.0)).answer, Stop):
    if work.has_rows:
        rows = work.read()
        part = write_columns(client.data, {"ref_log_probs": ...})
        client.done(work.consumer, [(work.lease, None)], [(part, [(work.lease, work.positions)])])
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, assert_never

import numpy as np

from braidrl.data.codec import decode, encode
from braidrl.data.messages import Frame, Message
from braidrl.data.rows import Column, Rows
from braidrl.deferred import torch
from braidrl.queue.calls import (
    NOTHING,
    Abandon,
    Answer,
    Done,
    Free,
    Hello,
    Leased,
    Lost,
    MissingBlock,
    NodeRequest,
    QueueRequest,
    ReadRows,
    Renew,
    Served,
    ServedBytes,
    Take,
)
from braidrl.queue.storage import Place, open_storage
from braidrl.queue.table import Block, Positions, StoredRows, TablePiece, in_order
from braidrl.queue.transport import Connections

DECODED = 4
"""Number of blocks that a process keeps decoded."""


class Evicted(LookupError):
    """A block is missing because its rows were dropped; no stage needs them any more."""


class DataPlane:
    """A process's view of the payload of all nodes."""

    def __init__(self, location: Place, writer: str, limit_s: float = 60.0, secret: str | None = None) -> None:
        """Open the storage of the node at `location`, where this process is called `writer`. Raises UserError as
        `open_storage`.

        Other nodes, which know the secret, have `limit_s` seconds to answer.
        """
        self.segments = open_storage(location.storage, location.run, writer)
        self.address, self.host = location.address, location.host
        self.served = 0
        """Bytes sent by this node's server to other nodes."""
        self.carried = 0
        """Bytes of payload written or read by this process."""
        self.refuses_payload = False
        """True if this process must not read or write payload."""
        self.connections = Connections(limit_s, secret)
        """Connections to other nodes' servers, and to all servers that this process asks."""
        self._decoded: dict[tuple[str, tuple[str, ...]], Rows] = {}
        """The last blocks of this node that were read in part."""

    def write(self, frames: Sequence[Frame]) -> Block:
        """Write frames to a segment of this node. Raises OSError if memory is full."""
        self._carry(frames)
        name, size = self.segments.write(frames)
        return Block(self.host, self.address, name, size)

    def read_rows(self, block: Block, columns: Sequence[str], positions: Sequence[int] | None = None) -> Rows:
        """Return the named payload columns of a block, for all rows or some positions. Raises Evicted.

        The result is views on shared memory, or bytes from the block's node.
        """
        if block.host != self.host:
            request = ReadRows(block.name, list(columns), None if positions is None else list(positions))
            answer, frames = self.connections.ask(block.address, request)
            if isinstance(answer, MissingBlock):
                raise Evicted(f"{block.name} was evicted from {block.host}")
            return decode(self._carry(frames))
        # Workers take a large block in small leases: it is decoded once.
        key = block.name, tuple(columns)
        if positions is not None and (rows := self._decoded.get(key)) is not None:
            return rows.take(positions)
        try:
            frames = self.segments.read(block.name)
        except FileNotFoundError:
            raise Evicted(f"{block.name} was evicted") from None
        rows = decode(self._carry(frames), columns)
        if positions is None:
            return rows
        self._decoded[key] = rows
        while len(self._decoded) > DECODED:
            self._decoded.pop(next(iter(self._decoded)), None)
        return rows.take(positions)

    def _carry(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Count payload. Raises RuntimeError in a process that must not have any."""
        if self.refuses_payload:
            raise RuntimeError("the main process schedules and carries no payload: workers read and write rows")
        self.carried += sum(memoryview(frame).nbytes for frame in frames)
        return frames

    def free(self, blocks: Iterable[Block]) -> None:
        """Free blocks on any node, without waiting for replies."""
        by_address: defaultdict[str, list[str]] = defaultdict(list)
        for block in blocks:
            if block.host == self.host:
                self.segments.unlink([block.name])
            else:
                by_address[block.address].append(block.name)
        for address, names in by_address.items():
            self.connections.tell(address, Free(names))

    def abandon(self, address: str, writer: str, referenced: Collection[str]) -> None:
        """Free the segments of a dead process of the node at `address`, except the `referenced` ones."""
        request = Abandon(writer, sorted(referenced))
        if address == self.address:
            self.answer(request)
        else:
            self.connections.tell(address, request)

    def served_by(self, address: str) -> int:
        """Return the bytes that the node at `address` has sent to other nodes so far."""
        if address == self.address:
            return self.served
        return int(self.connections.ask(address, Served())[0].bytes)

    def answer(self, request: NodeRequest, frames: Sequence[Frame] = (), again: bool = False) -> Answer:
        """Answer another node: send rows of a block, or free blocks."""
        match request:
            case ReadRows():
                try:
                    rows = decode(self.segments.read(request.name), request.columns)
                except FileNotFoundError:
                    return MissingBlock(), ()
                frames = encode(rows if request.positions is None else rows.take(request.positions))
                self.served += sum(memoryview(frame).nbytes for frame in frames)
                return NOTHING[0], frames
            case Free():
                self.segments.unlink(request.names)
            case Abandon():
                self.segments.unlink(set(self.segments.names(request.writer)) - set(request.known))
            case Served():
                return ServedBytes(self.served), ()
            case _:
                assert_never(request)
        return NOTHING

    def close(self) -> None:
        """Close all connections."""
        self._decoded.clear()
        self.connections.close()


@dataclass(eq=False)
class WorkItem:
    """A piece of work in its worker: the queue's answer, and the rows of a lease once they are read."""

    data: DataPlane
    answer: Any
    """Has a type that the request names, or is `Waited`."""
    inline: Rows
    """Index columns that came with the answer."""
    positions: list[int] = field(default_factory=list)
    """The positions in the lease of the rows that this process has read."""
    rows: Rows = field(default_factory=lambda: Rows({}))
    """These rows, with the columns computed so far."""
    left: int = 0
    """Number of these rows that are running or being reported, for a process that reports rows one by one."""
    ended: int = 0
    """Number of the lease's rows that such a process has finished or lost."""

    @property
    def kind(self) -> type[Message]:
        """Return the type of the answer."""
        return type(self.answer)

    @property
    def has_rows(self) -> bool:
        """Return True for rows under a lease."""
        return isinstance(self.answer, Leased)

    @property
    def consumer(self) -> str:
        """Return the consumer of leased rows."""
        return str(self.answer.consumer)

    @property
    def lease(self) -> int:
        """Return the number of the lease."""
        return int(self.answer.lease)

    @property
    def size(self) -> int:
        """Return the number of rows of the lease."""
        return int(self.answer.size)

    @cached_property
    def index(self) -> Rows:
        """Return the index columns of all rows, which come with the answer to a worker of several ranks."""
        return self.inline

    def read(self, positions: Sequence[int] | None = None) -> Rows:
        """Read the rows, or those at some positions, with all columns that the consumer reads. Raises Evicted."""
        self.positions = list(range(self.size)) if positions is None else list(positions)
        if self.positions:
            self.rows = assembled(self.data, self.inline, self.answer.payload, self.size, positions)
        return self.rows

    def read_existing(self) -> Rows:
        """Read the rows except those that selection has dropped in the meantime."""
        with suppress(Evicted):
            return self.read()
        existing: dict[int, Rows] = {}
        for position in range(self.size):
            with suppress(Evicted):
                existing[position] = self.read([position])
        self.positions, self.rows = list(existing), Rows.cat(list(existing.values())) if existing else Rows({})
        return self.rows

    def share(self, positions: Sequence[int]) -> Rows:
        """Return this process's share of the rows at some positions, in the order of positions."""
        if positions == range(self.size) or list(positions) == self.positions:
            return self.rows
        numbers = np.full(self.size, -1)
        numbers[self.positions] = np.arange(len(self.positions))
        local_numbers = numbers[np.asarray(positions, dtype=np.int64)]
        local_numbers = local_numbers[local_numbers >= 0]
        return self.rows.take(torch.from_numpy(local_numbers)) if len(local_numbers) else Rows({})


class Client:
    """A process as a client of a controller.

    Thread-safe: each request has its own connection.
    """

    def __init__(self, address: str, holder: str, data: DataPlane, generates: bool = False) -> None:
        """Register, over the connections of `data`. Raises QueueTimeout if no queue answers at the address."""
        self.address, self.holder, self.data = address, holder, data
        self.held: set[int] = set()
        """Numbers of its leases; the process removes those that it cannot use."""
        self._renewed = time.monotonic()
        self.ask(Hello(data.address, generates))

    def ask(
        self, request: QueueRequest, frames: Sequence[Frame] = (), wait_s: float = 0.0
    ) -> tuple[Any, Sequence[Frame]]:
        """Send a request of this process and return its answer; the queue may defer the answer for `wait_s` seconds."""
        request.holder = self.holder
        return self.data.connections.ask(self.address, request, frames, wait_s)

    def tell(self, request: QueueRequest) -> None:
        """Send a request of this process without waiting for its answer."""
        request.holder = self.holder
        self.data.connections.tell(self.address, request)

    def take(self, request: Take, wait_s: float) -> WorkItem:
        """Return the next work within `wait_s` seconds; the request gets the numbers of this process's leases."""
        request.held = sorted(self.held)
        answer, frames = self.ask(request, wait_s=wait_s)
        if isinstance(answer, Lost):
            self.held.difference_update(answer.lost)
        if isinstance(answer, Leased):
            self.held.add(answer.lease)
        inline = decode([bytes(frame) for frame in frames]) if frames else Rows({})
        return WorkItem(self.data, answer, inline)

    def done(
        self,
        consumer: str,
        done: Positions,
        written: Sequence[tuple[StoredRows, Positions]] = (),
        reports: Sequence[dict[str, Any]] = (),
        totals: dict[str, dict[str, float]] | None = None,
        unfinished: bool = False,
        keeps: bool = False,
    ) -> list[int]:
        """Report that rows are done.

        Args:
            consumer: Name of the consumer.
            done: Lease numbers with positions in the lease; None is all rows of the lease.
            written: New columns, with the rows of each part in the form of `done`.
            reports: Content for the iteration's metrics.
            totals: By stage with a state, sums over its batch.
            unfinished: True if the rows are suspended: they have tokens, and are not done.
            keeps: True if the leases have further rows.

        Returns:
            The numbers of lost leases, whose rows now belong to other workers.
        """
        frames: list[Frame] = []
        parts = [(part.message(frames), rows) for part, rows in written]
        return self.report(Done(consumer, done, parts, reports, totals, unfinished), frames, keeps)

    def report(self, request: Done, frames: Sequence[Frame], keeps: bool = False) -> list[int]:
        """Send a report of `done`, and return what it returns."""
        answer: Lost = self.ask(request, frames)[0]
        if not keeps:
            self.held.difference_update(number for number, _ in request.done)
        return list(answer.lost)

    def renew(self, every_s: float = 0.0) -> Lost:
        """Send a heartbeat if the last request is `every_s` seconds old; return what was lost since."""
        if time.monotonic() - self._renewed < every_s:
            return Lost()
        self._renewed = time.monotonic()
        answer: Lost = self.ask(Renew(sorted(self.held)))[0]
        self.held.difference_update(answer.lost)
        return answer

    def close(self) -> None:
        """Close all connections."""
        self.data.close()


def write_columns(data: DataPlane, columns: Mapping[str, Column]) -> StoredRows:
    """Put new columns of these rows into storage, including index columns."""
    written = Rows(columns)
    block = data.write(encode(written)) if len(written) else None
    return StoredRows.of_block(written.index, block, list(written.payload), len(written))


def assembled(
    data: DataPlane, inline: Rows, payload: Sequence[TablePiece], size: int, requested: Sequence[int] | None = None
) -> Rows:
    """Return rows with columns read from their blocks.

    Args:
        data: Reads the blocks.
        inline: Columns that are not in a block.
        payload: Pieces of blocks, from `Table.payload`.
        size: The number of rows.
        requested: Positions of the requested rows, in this order; None is all.

    Raises:
        Evicted: A block is missing.
    """
    order = None if requested is None else {position: number for number, position in enumerate(requested)}
    parts_of: defaultdict[tuple[str, ...], list[tuple[Rows, Sequence[int]]]] = defaultdict(list)
    for piece in payload:
        positions: Sequence[int] = range(piece.rows) if piece.positions is None else piece.positions
        targets: Sequence[int] = range(piece.rows) if piece.targets is None else piece.targets
        if order is not None and order.keys().isdisjoint(targets):
            continue
        if order is not None:
            pairs = [(at, order[target]) for at, target in zip(positions, targets, strict=True) if target in order]
            positions, targets = [at for at, _ in pairs], [target for _, target in pairs]
        if not len(positions) or not piece.columns:
            continue
        assert piece.block is not None, "columns without a block are index columns, which are inline"
        all_rows = len(positions) == piece.rows and list(positions) == list(range(piece.rows))
        rows = data.read_rows(piece.block, piece.columns, None if all_rows else positions)
        parts_of[tuple(piece.columns)].append((rows, targets))
    columns = dict[str, Column]()
    for parts in parts_of.values():
        rows = Rows.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        columns.update(in_order(rows, [target for _, targets in parts for target in targets]).items())
    columns.update((inline if requested is None or not len(inline) else inline.take(requested)).items())
    return Rows(columns)

"""A worker's side of the queue: take ready rows, read them as views, write columns, report them as done.

while (work := client.take(["reference.log_probs"], most=64, wait_s=5.0)).kind != "stop":
    if work.kind == "rows":
        part = write_columns(client.data, {"ref_log_probs": ...})
        client.done(work.consumer, [(work.lease, None)], [(part, work.places)])
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from braidrl.data.codec import decode, encode
from braidrl.data.messages import Frame
from braidrl.data.rows import Column, Rows
from braidrl.queue.storage import Place, open_storage
from braidrl.queue.table import Block, StoredRows, in_order
from braidrl.queue.transport import Answer, Connections

DECODED = 4
"""Number of blocks that a process keeps decoded."""


class Evicted(LookupError):
    """A missing block: its rows were dropped, so no stage needs them any more."""


class DataPlane:
    """A process's view of the payload of all nodes."""

    def __init__(self, place: Place, writer: str, limit_s: float = 60.0, secret: str | None = None) -> None:
        """Open the storage of the node at `place`, where this process is called `writer`. Raises UserError as
        `open_storage`.

        Other nodes, which know the secret, have `limit_s` seconds to answer.
        """
        self.segments = open_storage(place.storage, place.run, writer)
        self.address, self.host = place.address, place.host
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
            wanted = {"request": "rows", "name": block.name, "columns": list(columns), "positions": positions}
            answer, frames = self.connections.ask(block.address, wanted)
            if "missing" in answer:
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
            raise RuntimeError("the main program decides and carries no payload: a worker reads and writes rows")
        self.carried += sum(memoryview(frame).nbytes for frame in frames)
        return frames

    def free(self, blocks: Iterable[Block]) -> None:
        """Free blocks on any node, without waiting for other nodes."""
        by_address: defaultdict[str, list[str]] = defaultdict(list)
        for block in blocks:
            if block.host == self.host:
                self.segments.unlink([block.name])
            else:
                by_address[block.address].append(block.name)
        for address, names in by_address.items():
            self.connections.tell(address, {"request": "free", "names": names})

    def abandon(self, address: str, writer: str, known: Collection[str]) -> None:
        """Free the segments of a dead process of the node at `address`, except the `known` ones."""
        request = {"request": "abandon", "writer": writer, "known": sorted(known)}
        if address == self.address:
            self.answer(request)
        else:
            self.connections.tell(address, request)

    def served_by(self, address: str) -> int:
        """Return the bytes that the node at `address` has sent to other nodes so far."""
        if address == self.address:
            return self.served
        return int(self.connections.ask(address, {"request": "served"})[0]["bytes"])

    def answer(self, request: dict[str, Any], frames: Sequence[Frame] = ()) -> Answer:
        """Answer another node: send rows of a block, or free blocks."""
        kind = request["request"]
        if kind == "served":
            return {"bytes": self.served}, ()
        if kind == "free":
            self.segments.unlink(request["names"])
            return {}, ()
        if kind == "abandon":
            self.segments.unlink(set(self.segments.names(request["writer"])) - set(request["known"]))
            return {}, ()
        if kind != "rows":
            raise ValueError(f"there is no request {kind!r}")
        try:
            rows = decode(self.segments.read(request["name"]), request["columns"])
        except FileNotFoundError:
            return {"missing": request["name"]}, ()
        frames = encode(rows if request["positions"] is None else rows.take(request["positions"]))
        self.served += sum(memoryview(frame).nbytes for frame in frames)
        return {}, frames

    def close(self) -> None:
        """Close all connections."""
        self._decoded.clear()
        self.connections.close()


@dataclass(eq=False)
class WorkItem:
    """A piece of work: `rows` of a consumer, an optimizer `step`, weights to `load`, or an `order`."""

    kind: str
    data: DataPlane
    message: Mapping[str, Any]
    inline: Rows
    """Index columns that came with the message."""
    lost: tuple[int, ...] = ()
    """Leases that this worker has lost."""
    dropped: tuple[tuple[int, list[int]], ...] = ()
    """Rows that it has lost, by lease and positions in it."""
    own: list[int] = field(default_factory=list)
    """The positions in the lease of the rows that this process has read."""
    rows: Rows = field(default_factory=lambda: Rows({}))
    """These rows, with the columns computed so far."""
    left: int = 0
    """Number of these that are running or being reported, for a process that reports rows one by one."""
    ended: int = 0
    """Number of the lease's rows that such a process has finished with, or has lost."""

    def __post_init__(self) -> None:
        self.consumer: str = self.message.get("consumer", "")
        self.iteration: int = self.message.get("iteration", 0)
        self.lease: int = self.message.get("lease", -1)
        self.size: int = self.message.get("size", 0)
        """Number of rows of the lease."""

    @cached_property
    def index(self) -> Rows:
        """Return the index columns of all rows. Raises Evicted."""
        return assembled(self.data, self.inline, self.message["payload"], self.size, index=True)

    def read(self, places: Sequence[int] | None = None) -> Rows:
        """Read the rows, or those at some positions, with all columns that the consumer reads. Raises Evicted."""
        self.own = list(range(self.size)) if places is None else list(places)
        if self.own:
            self.rows = assembled(self.data, self.inline, self.message["payload"], self.size, places)
        return self.rows

    def read_existing(self) -> Rows:
        """Read the rows except those that selection has dropped meanwhile."""
        with suppress(Evicted):
            return self.read()
        found: dict[int, Rows] = {}
        for place in range(self.size):
            with suppress(Evicted):
                found[place] = self.read([place])
        self.own, self.rows = list(found), Rows.cat(list(found.values())) if found else Rows({})
        return self.rows

    def share(self, places: Sequence[int]) -> Rows:
        """Return this process's rows among those at some positions, in the order of these."""
        if list(places) == self.own:
            return self.rows
        standing = {place: number for number, place in enumerate(self.own)}
        mine = [standing[place] for place in places if place in standing]
        return self.rows.take(mine) if mine else Rows({})


class Client:
    """One process as a client of a controller. Thread-safe: each request has its own connection."""

    def __init__(self, address: str, holder: str, data: DataPlane, generates: bool = False) -> None:
        """Register, over the connections of `data`. Raises QueueTimeout if no queue answers at the address."""
        self.address, self.holder, self.data = address, holder, data
        self.held: set[int] = set()
        """Numbers of its leases; the process removes those that it cannot use."""
        self._renewed = time.monotonic()
        self.ask("hello", generates=generates, address=data.address)

    def ask(self, request: str, frames: Sequence[Frame] = (), wait_s: float = 0.0, **fields: Any) -> Answer:
        """Send one request of this process and return its answer; the queue may hold it back for `wait_s` seconds."""
        message = {"request": request, "holder": self.holder, "wait_s": wait_s, **fields}
        return self.data.connections.ask(self.address, message, frames, wait_s)

    def tell(self, request: str, **fields: Any) -> None:
        """Send one request of this process without waiting for its answer."""
        self.data.connections.tell(self.address, {"request": request, "holder": self.holder, **fields})

    def take(self, consumers: Sequence[str], most: int, wait_s: float, ranks: int = 1, **fields: Any) -> WorkItem:
        """Return the next work for one of the consumers: of kind `stop` at the run's end, and `wait` after the time
        limit.

        Args:
            consumers: Names of consumers, the most urgent first.
            most: Limit of rows.
            wait_s: Seconds to wait for work.
            ranks: Processes that share the rows.
            fields: Further fields of the request.
        """
        answer, frames = self.ask(
            "take", wait_s=wait_s, consumers=list(consumers), most=most, ranks=ranks, held=sorted(self.held), **fields
        )
        lost = tuple(answer.get("lost", ()))
        self.held.difference_update(lost)
        kind = "wait" if answer.get("waited") else answer["kind"]
        if kind == "rows":
            self.held.add(answer["lease"])
        inline = decode([bytes(frame) for frame in frames]) if frames else Rows({})
        return WorkItem(kind, self.data, answer, inline, lost, tuple(answer.get("dropped", ())))

    def done(
        self,
        consumer: str,
        done: Sequence[tuple[int, Sequence[int] | None]],
        written: Sequence[tuple[StoredRows, Any]] = (),
        reports: Sequence[Mapping[str, Any]] = (),
        totals: Mapping[str, Mapping[str, float]] | None = None,
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
        parts = [{**part.message(frames), "rows": rows} for part, rows in written]
        answer, _ = self.ask(
            "done",
            frames,
            consumer=consumer,
            done=list(done),
            parts=parts,
            reports=list(reports),
            totals=dict(totals or {}),
            unfinished=unfinished,
        )
        if not keeps:
            self.held.difference_update(number for number, _ in done)
        return list(answer["lost"])

    def renew(self, every_s: float = 0.0) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Send a heartbeat if the last request is `every_s` seconds old; return lost leases and dropped rows, as in a
        WorkItem.
        """
        if time.monotonic() - self._renewed < every_s:
            return [], []
        self._renewed = time.monotonic()
        answer = self.ask("renew", held=sorted(self.held))[0]
        self.held.difference_update(answer["lost"])
        return list(answer["lost"]), list(answer.get("dropped", ()))

    def close(self) -> None:
        """Close all connections."""
        self.data.close()


def write_columns(data: DataPlane, columns: Mapping[str, Column]) -> StoredRows:
    """Put new columns of these rows into storage, index columns too."""
    written = Rows(columns)
    block = data.write(encode(written)) if len(written) else None
    return StoredRows.of_block(written.index, block, list(written.payload), len(written))


def assembled(
    data: DataPlane,
    inline: Rows,
    payload: Sequence[Mapping[str, Any]],
    size: int,
    places: Sequence[int] | None = None,
    index: bool = False,
) -> Rows:
    """Return rows with columns read from their blocks.

    Args:
        data: Reads the blocks.
        inline: Columns that are not in a block.
        payload: Pieces of blocks, from `Table.payload`.
        size: The number of rows.
        places: Positions of the wanted rows, in this order; None is all.
        index: Read only the index columns.

    Raises:
        Evicted: A block is gone.
    """
    standing = None if places is None else {place: number for number, place in enumerate(places)}
    found: defaultdict[tuple[str, ...], list[tuple[Rows, Sequence[int]]]] = defaultdict(list)
    for piece in payload:
        names = piece["index"] if index else piece["columns"]
        positions, at = piece["positions"], piece["places"]
        if positions is None:
            positions = at = range(piece["rows"])
        if standing is not None:
            pairs = [(p, standing[a]) for p, a in zip(positions, at, strict=True) if a in standing]
            positions, at = [p for p, _ in pairs], [a for _, a in pairs]
        if not len(positions) or not names:
            continue
        whole = len(positions) == piece["rows"] and list(positions) == list(range(piece["rows"]))
        found[tuple(names)].append((data.read_rows(Block(*piece["block"]), names, None if whole else positions), at))
    columns = dict[str, Column]()
    for parts in found.values():
        rows = Rows.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        columns.update(in_order(rows, [a for _, many in parts for a in many]).items())
    columns.update((inline if places is None or not len(inline) else inline.take(places)).items())
    return Rows(columns)

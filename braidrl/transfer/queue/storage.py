"""Payload in the storage of the node where it was written; readers on other nodes ask that node's server for their rows.

same node     read ──▶ segment, as views
another node  read ──▶ that node's server ──▶ the named columns of the rows that are asked for, as frames

What a node keeps it in is its storage backend's business.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.rows import Rows
from braidrl.transfer.queue.storage_backends import StorageBackend, open_storage
from braidrl.transfer.queue.transport import Answer, Connections


class Block(NamedTuple):
    """Where some frames lie: a segment of a node, and the address at which that node's server gives them to others."""

    host: str
    address: str
    name: str
    size: int


class Place(NamedTuple):
    """What a process has to know of its node: its name, that of the run's segments, its server's address, and the storage."""

    host: str
    run: str
    address: str
    storage: str = "shared_memory"


class Evicted(LookupError):
    """A block is gone: its rows were dropped, so that whatever was to be made of them is not needed."""


class DataPlane:
    """A process's view of the payload of all nodes. `host` names its own one, whose server is at `address`."""

    def __init__(
        self, segments: StorageBackend, address: str, host: str = "here", limit_s: float = 60.0,
        secret: str | None = None,
    ) -> None:  # fmt: skip
        self.segments, self.address, self.host, self.secret = segments, address, host, secret
        self.served = 0
        """Bytes that this node's server has given to other nodes."""
        self.connections = Connections(limit_s, secret)
        """To other nodes' servers, and to whoever else this process asks."""

    @staticmethod
    def at(place: Place, writer: str, limit_s: float = 60.0, secret: str | None = None) -> "DataPlane":
        """Return the view of a process at a place."""
        return DataPlane(open_storage(place.storage, place.run, writer), place.address, place.host, limit_s, secret)

    def write(self, frames: Sequence[Frame]) -> Block:
        """Put frames into a segment of this node. Raises OSError where memory is full."""
        name, size = self.segments.write(frames)
        return Block(self.host, self.address, name, size)

    def write_rows(self, rows: Rows) -> Block | None:
        """Write the payload columns as a block; None where there are none."""
        payload = rows.payload
        return self.write(encode(payload)) if list(payload) else None

    def read(self, block: Block) -> Sequence[Frame]:
        """Return the block's frames: views on shared memory, or bytes from its node. Raises Evicted."""
        if block.host == self.host:
            return self._here(block.name)
        return self._from(block, {"request": "frames", "name": block.name})

    def read_rows(self, block: Block, columns: Sequence[str], positions: Sequence[int] | None = None) -> Rows:
        """Return the named payload columns of a block, of all its rows or of those at some positions. Raises Evicted."""
        if block.host == self.host:
            return chosen(self._here(block.name), columns, positions)
        wanted = {"columns": list(columns), "positions": positions}
        return decode(self._from(block, {"request": "rows", "name": block.name, **wanted}))

    def free(self, blocks: Iterable[Block]) -> None:
        """Free blocks, on whatever node they are; nobody waits for other nodes."""
        by_address: defaultdict[str, list[str]] = defaultdict(list)
        for block in blocks:
            if block.host == self.host:
                self.segments.unlink([block.name])
            else:
                by_address[block.address].append(block.name)
        for address, names in by_address.items():
            self.connections.tell(address, {"request": "free", "names": names})

    def missing(self, blocks: Iterable[Block]) -> set[str]:
        """Return the names of those blocks that should be on this node and are not."""
        wanted = {block.name for block in blocks if block.host == self.host}
        return wanted - set(self.segments.names()) if wanted else wanted

    def abandon(self, address: str, writer: str, known: Collection[str]) -> None:
        """Free what a process of the node at `address` has written, but for the segments that are `known`: it is gone."""
        request = {"request": "abandon", "writer": writer, "known": sorted(known)}
        if address == self.address:
            self.answer(request)
        else:
            self.connections.tell(address, request)

    def served_by(self, address: str) -> int:
        """Return the bytes that the node at `address` has given to others so far."""
        if address == self.address:
            return self.served
        return int(self.connections.ask(address, {"request": "served"})[0]["bytes"])

    def answer(self, request: dict[str, Any]) -> Answer:
        """Answer another node: with frames or rows of a block, or that blocks are freed."""
        if request["request"] == "served":
            return {"bytes": self.served}, ()
        if request["request"] == "free":
            self.segments.unlink(request["names"])
            return {}, ()
        if request["request"] == "abandon":
            self.segments.unlink(set(self.segments.names(request["writer"])) - set(request["known"]))
            return {}, ()
        try:
            frames: Sequence[Frame] = self.segments.read(request["name"])
        except FileNotFoundError:
            return {"missing": request["name"]}, ()
        if request["request"] == "rows":
            frames = encode(chosen(frames, request["columns"], request["positions"]))
        self.served += sum(memoryview(frame).nbytes for frame in frames)
        return {}, frames

    def close(self) -> None:
        """Close all connections."""
        self.connections.close()

    def _here(self, name: str) -> Sequence[Frame]:
        try:
            return self.segments.read(name)
        except FileNotFoundError:
            raise Evicted(f"{name} was evicted") from None

    def _from(self, block: Block, request: dict[str, Any]) -> Sequence[Frame]:
        answer, frames = self.connections.ask(block.address, request)
        if "missing" in answer:
            raise Evicted(f"{block.name} was evicted from {block.host}")
        return frames


def chosen(frames: Sequence[Frame], columns: Sequence[str], positions: Sequence[int] | None) -> Rows:
    """Return the named columns of encoded rows, of all or of those at some positions."""
    rows = decode(frames, columns)
    return rows if positions is None else rows.take(positions)

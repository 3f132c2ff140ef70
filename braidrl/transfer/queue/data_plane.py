"""Payload in the shared memory of the node where it was written; other nodes ask that node's server for its frames."""

from __future__ import annotations

import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.rows import Rows
from braidrl.transfer.queue.messages import Connection
from braidrl.transfer.queue.segments import Segments


class Block(NamedTuple):
    """Where some frames lie: a segment of a node, and the address at which that node's server gives them to others."""

    host: str
    address: str
    name: str
    size: int


def host_name() -> str:
    """Names this node, the same for all of its processes."""
    return f"{socket.gethostname()}-{uuid.getnode():x}"


class Evicted(LookupError):
    """A block is gone: its rows were dropped, so that whatever was to be made of them is not needed."""


class DataPlane:
    """A process's view of the payload of all nodes. `address` is that of this node's server."""

    def __init__(self, segments: Segments, address: str, host: str | None = None, limit_s: float = 60.0) -> None:
        self.segments, self.address, self.limit_s = segments, address, limit_s
        self.host = host_name() if host is None else host
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def write(self, frames: Sequence[Frame]) -> Block:
        """Puts frames into a segment of this node. Raises OSError where memory is full."""
        name, size = self.segments.write(frames)
        return Block(self.host, self.address, name, size)

    def write_rows(self, rows: Rows) -> Block | None:
        """The payload columns as a block; None where there are none."""
        payload = rows.payload
        return self.write(encode(payload)) if list(payload) else None

    def read(self, block: Block) -> Sequence[Frame]:
        """The block's frames: views on shared memory, or bytes from its node. Raises Evicted."""
        if block.host == self.host:
            try:
                return self.segments.read(block.name)
            except FileNotFoundError:
                raise Evicted(f"{block.name} was evicted") from None
        with self._lock:
            answer, frames = self._connection(block.address).ask({"request": "frames", "name": block.name})
        if "missing" in answer:
            raise Evicted(f"{block.name} was evicted from {block.host}")
        return frames

    def read_rows(self, block: Block, columns: Sequence[str]) -> Rows:
        """The named payload columns of a block."""
        return decode(self.read(block), columns)

    def free(self, blocks: Iterable[Block]) -> None:
        """Evicts blocks, on whatever node they are."""
        by_address: defaultdict[str, list[str]] = defaultdict(list)
        for block in blocks:
            if block.host == self.host:
                self.segments.unlink([block.name])
            else:
                by_address[block.address].append(block.name)
        with self._lock:
            for address, names in by_address.items():
                self._connection(address).ask({"request": "free", "names": names})

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], Sequence[Frame]]:
        """What this node's server says to others: a block's frames, or that blocks are freed."""
        if request["request"] == "free":
            self.segments.unlink(request["names"])
            return {}, ()
        try:
            return {}, self.segments.read(request["name"])
        except FileNotFoundError:
            return {"missing": request["name"]}, ()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _connection(self, address: str) -> Connection:
        if address not in self._connections:
            self._connections[address] = Connection(address, self.limit_s)
        return self._connections[address]

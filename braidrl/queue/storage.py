"""Storage of payload on the node that wrote it; readers on other nodes get their rows from that node's server.

same node     read ──▶ segment, as views
another node  read ──▶ that node's server ──▶ the named columns of the requested rows, as frames

A segment is written once, whole, by one process, and can be read until it is unlinked. Its name, braid-<run>-<writer>-<n>, contains
the run and the writing process, so that all segments of either can be found. Segments are files in shared memory or on a disk
(`Segments`), or values of another backend (`storage_backends`).
"""

import itertools
import mmap
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.data.codec import decode, encode
from braidrl.data.messages import Frame, laid_out, split
from braidrl.data.rows import Rows
from braidrl.queue.table import Block
from braidrl.queue.transport import Answer, Connections

DECODED = 4
"""Number of blocks that a process keeps decoded."""
NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


class Place(NamedTuple):
    """The description of a node for its processes: its name, the run's name, its server's address, and the storage."""

    host: str
    run: str
    address: str
    storage: str = "shared_memory"


class Evicted(LookupError):
    """A missing block: its rows were dropped, so no stage needs them any more."""


class StorageBackend(Protocol):
    """The segments of one run. `check_storage` is the contract test."""

    run: str

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes. Raises OSError if there is no room."""

    def read(self, name: str) -> Sequence[Frame]:
        """Return the frames of a segment. Raises FileNotFoundError after its removal, ValueError for an invalid name."""

    def unlink(self, names: Collection[str]) -> None:
        """Free segments; missing ones are ignored. Raises ValueError for an invalid name."""

    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of the run's segments, of all writers or of one."""


class DataPlane:
    """A process's view of the payload of all nodes. `host` names its own node, whose server is at `address`."""

    def __init__(
        self, segments: StorageBackend, address: str, host: str = "here", limit_s: float = 60.0,
        secret: str | None = None,
    ) -> None:  # fmt: skip
        self.segments, self.address, self.host, self.secret = segments, address, host, secret
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

    def read(self, block: Block) -> Sequence[Frame]:
        """Return the block's frames: views on shared memory, or bytes from its node. Raises Evicted."""
        if block.host == self.host:
            return self._carry(self._here(block.name))
        return self._carry(self._from(block, {"request": "frames", "name": block.name}))

    def read_rows(self, block: Block, columns: Sequence[str], positions: Sequence[int] | None = None) -> Rows:
        """Return the named payload columns of a block, for all rows or some positions. Raises Evicted."""
        if block.host == self.host and positions is not None:
            # Workers take a large block in small leases: it is decoded once.
            key = block.name, tuple(columns)
            if (rows := self._decoded.get(key)) is None:
                rows = self._decoded[key] = decode(self._carry(self._here(block.name)), columns)
                while len(self._decoded) > DECODED:
                    self._decoded.pop(next(iter(self._decoded)), None)
            return rows.take(positions)
        if block.host == self.host:
            return decode(self._carry(self._here(block.name)), columns)
        wanted = {"columns": list(columns), "positions": positions}
        return decode(self._carry(self._from(block, {"request": "rows", "name": block.name, **wanted})))

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

    def missing(self, blocks: Iterable[Block]) -> set[str]:
        """Return the names of blocks that should be on this node and are missing."""
        wanted = {block.name for block in blocks if block.host == self.host}
        return wanted - set(self.segments.names()) if wanted else wanted

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
        """Answer another node: send frames or rows of a block, or free blocks."""
        if request["request"] == "served":
            return {"bytes": self.served}, ()
        if request["request"] == "free":
            self.segments.unlink(request["names"])
            return {}, ()
        if request["request"] == "abandon":
            self.segments.unlink(set(self.segments.names(request["writer"])) - set(request["known"]))
            return {}, ()
        try:
            frames = self.segments.read(request["name"])
        except FileNotFoundError:
            return {"missing": request["name"]}, ()
        if request["request"] == "rows":
            rows, positions = decode(frames, request["columns"]), request["positions"]
            frames = encode(rows if positions is None else rows.take(positions))
        self.served += sum(memoryview(frame).nbytes for frame in frames)
        return {}, frames

    def close(self) -> None:
        """Close all connections."""
        self._decoded.clear()
        self.connections.close()

    def _carry(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Count payload. Raises RuntimeError in a process that must not have any."""
        if self.refuses_payload:
            raise RuntimeError("the main program decides and carries no payload: a worker reads and writes rows")
        self.carried += sum(memoryview(frame).nbytes for frame in frames)
        return frames

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


class Named:
    """Names for the segments of one process."""

    def __init__(self, run: str, writer: str) -> None:
        """Begin with number 0; `writer` separates the segments of processes."""
        self.run, self.writer = run, re.sub(r"[^A-Za-z0-9_.]", ".", writer)
        self._numbers = itertools.count()

    def next_name(self) -> str:
        """Return a name that no other segment of the run has."""
        return f"{PREFIX}{self.run}-{self.writer}-{next(self._numbers)}"

    def pattern(self, writer: str | None) -> str:
        """Return the glob pattern of a writer's segments, or of all."""
        return f"{PREFIX}{self.run}-{'*' if writer is None else re.sub(r'[^A-Za-z0-9_.]', '.', writer)}-*"


class Segments(Named):
    """Segments as files of one folder."""

    def __init__(self, run: str, writer: str, folder: Path | None = None) -> None:
        """Use shared memory, or another folder."""
        super().__init__(run, writer)
        self.folder = folder or shared_folder()

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        size, pieces = laid_out(frames)
        name = self.next_name()
        handle = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Not through a mapping: that first fills every page with zeros, and full memory then ends the process by SIGBUS.
            os.ftruncate(handle, size)
            for start, piece in pieces:
                written = 0
                while written < piece.nbytes:
                    written += os.pwrite(handle, piece[written:], start + written)
        except BaseException as error:
            self.unlink([name])
            if isinstance(error, OSError):
                error.filename = str(self.folder)
            raise
        finally:
            os.close(handle)
        return name, size

    def read(self, name: str) -> list[memoryview]:
        """Return read-only views, which keep the memory even after the segment is unlinked."""
        handle = os.open(self.folder / allowed(name), os.O_RDONLY)
        try:
            return split(memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ)))
        finally:
            os.close(handle)

    def unlink(self, names: Collection[str]) -> None:
        """Free segments after their last reader; missing ones are ignored."""
        for name in names:
            (self.folder / allowed(name)).unlink(missing_ok=True)

    def names(self, writer: str | None = None) -> list[str]:
        return sorted(path.name for path in self.folder.glob(self.pattern(writer)))


def allowed(name: str) -> str:
    """Return a valid segment name. It came over the wire and must not lead outside the folder. Raises ValueError for any other."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment's name")
    return name

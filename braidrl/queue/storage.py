"""Storage of payload on the node that wrote it; readers on other nodes get their rows from that node's server.

same node     read ──▶ segment, as views
another node  read ──▶ that node's server ──▶ the named columns of the requested rows, as frames

A segment is written once by one process, and can be read until it is unlinked. Its name,
braid-<run>-<writer>-<n>, contains the run and the writing process, so that all segments of either can be found.
`open_storage` makes the storage of a name:

shared_memory            files under /dev/shm, read as views                    the default
file:/path               the same files on a disk                               holds what memory cannot
redis://host:port/0      values of a Redis server, read as copies               needs the package redis
"""

import itertools
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from braidrl.cluster.shared_memory import PREFIX, shared_folder, write_at
from braidrl.data.messages import Frame, join, laid_out, split
from braidrl.errors import UserError

NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


class Place(NamedTuple):
    """The description of a node for its processes: its name, the run's name, its server's address, and the storage."""

    host: str
    run: str
    address: str
    storage: str = "shared_memory"


class StorageBackend(ABC):
    """One process's access to the segments of a run. `check_storage` is the contract test."""

    def __init__(self, run: str, writer: str) -> None:
        """Start with number 0; `writer` separates the segments of processes."""
        self.run, self.writer, self._numbers = run, writer, itertools.count()

    def next_name(self) -> str:
        """Return a name that no other segment of the run has."""
        return self.pattern(self.writer).replace("*", str(next(self._numbers)))

    def pattern(self, writer: str | None) -> str:
        """Return the glob pattern of a writer's segments, or of all."""
        return f"{PREFIX}{self.run}-{'*' if writer is None else re.sub(r'[^A-Za-z0-9_.]', '.', writer)}-*"

    @abstractmethod
    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes.

        Raises OSError if memory or disk is full.
        """

    @abstractmethod
    def read(self, name: str) -> Sequence[Frame]:
        """Return the frames of a segment.

        Raises FileNotFoundError after its removal, ValueError for an invalid name.
        """

    @abstractmethod
    def unlink(self, names: Collection[str]) -> None:
        """Free segments; missing ones are ignored. Raises ValueError for an invalid name."""

    @abstractmethod
    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of the run's segments, of all writers or of one."""


def open_storage(storage: str, run: str, writer: str) -> StorageBackend:
    """Return a process's access to a run's segments.

    Args:
        storage: `shared_memory`, `file:/path` or `redis://host:port/0`.
        run: The run's name, hexadecimal.
        writer: The process's name.

    Raises:
        UserError: The storage is unknown, or it cannot be reached.
    """
    if storage == "shared_memory":
        return Segments(run, writer)
    if storage.startswith("file:"):
        folder = Path(storage.removeprefix("file:"))
        if not folder.is_dir():
            raise UserError(f"storage {storage}: there is no folder {folder}; make it")
        return Segments(run, writer, folder)
    if storage.startswith("redis://"):
        return RedisStorage(run, writer, storage)
    raise UserError(f"no storage is called {storage!r}; write shared_memory, file:/path or redis://host:port/0")


def allowed(name: str) -> str:
    """Return a valid segment name.

    It came over the wire and must not lead outside the folder. Raises ValueError for any other.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment's name")
    return name


class Segments(StorageBackend):
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
            os.ftruncate(handle, size)
            for start, piece in pieces:
                write_at(handle, piece, start)
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


class RedisStorage(StorageBackend):
    """Segments as values of a Redis server; each process has one connection."""

    def __init__(self, run: str, writer: str, address: str) -> None:
        """Connect. Raises UserError if the package, or a server at the address, is missing."""
        super().__init__(run, writer)
        try:
            # Imported here: Redis is optional.
            import redis
        except ImportError:
            raise UserError("storage redis:// needs the package redis; pip install 'braidrl[redis]'") from None
        self._server = redis.Redis.from_url(address)
        try:
            self._server.ping()
        except redis.ConnectionError as error:
            raise UserError(f"storage {address}: no Redis server answers there ({error})") from None

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        content, name = join(frames), self.next_name()
        self._server.set(name, memoryview(content))
        return name, len(content)

    def read(self, name: str) -> list[memoryview]:
        content = self._server.get(allowed(name))
        if content is None:
            raise FileNotFoundError(name)
        assert isinstance(content, bytes)
        return split(memoryview(content))

    def unlink(self, names: Collection[str]) -> None:
        if keys := [allowed(name) for name in names]:
            self._server.unlink(*keys)

    def names(self, writer: str | None = None) -> list[str]:
        return sorted(name.decode() for name in self._server.scan_iter(match=self.pattern(writer)))


def check_storage(storage: str) -> None:
    """Contract test of a storage backend; call it from the backend's own test. Raises AssertionError if it fails."""
    first, second = (open_storage(storage, "c0ffee", writer) for writer in ("one", "two/slash"))
    frames = [b"", b"first", bytes(range(256)) * 300]
    try:
        name, size = first.write(frames)
        other_name, _ = second.write([b"other"])
        assert size >= sum(map(len, frames)) and name != other_name, "segments have names of their own, and their size"
        assert [bytes(frame) for frame in second.read(name)] == frames, "what one process wrote another reads"
        assert first.names() == sorted([name, other_name]) and first.names("two/slash") == [other_name], (
            "a writer's segments are found"
        )
        read = second.read(name)
        first.unlink([name, name])
        assert [bytes(frame) for frame in read] == frames, "what was read stays when the segment is unlinked"
        assert first.names() == [other_name], "an unlinked segment is gone"
        for call in (
            lambda: second.read(name),
            lambda: second.read("../etc/passwd"),
            lambda: second.unlink(["../etc/passwd"]),
        ):
            try:
                call()
            except (FileNotFoundError, ValueError):
                continue
            raise AssertionError("a segment that is gone, or what is no segment's name, is refused")
    finally:
        first.unlink(first.names())

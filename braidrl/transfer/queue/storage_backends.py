"""Where payload lies: an interface, and what implements it. `open_storage` makes one by name.

shared_memory            files under /dev/shm, read as views                    the default
file:/path               the same files on a disk: as much room as that has     spills what memory cannot hold
redis://host:port/0      values of a Redis server, read as copies               needs the package redis

A segment is written once, whole, by whoever makes it, and can be read until it is unlinked. Its name, braid-<run>-<writer>-<n>, carries
the run and the process that wrote it, so that all that either has left can be found.
"""

import itertools
import mmap
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from braidrl.data.frames import Frame, join, laid_out, split
from braidrl.errors import UserError

SHARED = "/dev/shm"
PREFIX = "braid-"
NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


class StorageBackend(Protocol):
    """The segments of one run. `check_storage` is its contract."""

    run: str

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes. Raises OSError where there is no room."""

    def read(self, name: str) -> Sequence[Frame]:
        """Return the frames of a segment. Raises FileNotFoundError for one that was unlinked, ValueError for what is no name."""

    def unlink(self, names: Collection[str]) -> None:
        """Free segments; those that are gone already are left at that. Raises ValueError for what is no name."""

    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of all segments of the run, or those of one writer."""


def shared_folder() -> Path:
    """Return where files live in memory: the folder that BRAID_SHARED_MEMORY names, else /dev/shm; without such a place, on disk."""
    folder = Path(os.environ.get("BRAID_SHARED_MEMORY", SHARED))
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def open_storage(storage: str, run: str, writer: str) -> StorageBackend:
    """Return a process's access to a run's segments.

    Args:
        storage: `shared_memory`, `file:/path` or `redis://host:port/0`.
        run: the run's name, hexadecimal.
        writer: the process's name.

    Raises:
        UserError: no storage is called so, or it cannot be reached.
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
    """Return a segment's name, which came over the wire and must not lead anywhere else. Raises ValueError for any other."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment's name")
    return name


class Named:
    """Gives names to the segments of one process."""

    def __init__(self, run: str, writer: str) -> None:
        """Begin with number 0; `writer` tells the segments of processes apart."""
        self.run, self.writer = run, re.sub(r"[^A-Za-z0-9_.]", ".", writer)
        self._numbers = itertools.count()

    def next_name(self) -> str:
        """Return a name that no other segment of the run has."""
        return f"{PREFIX}{self.run}-{self.writer}-{next(self._numbers)}"

    def pattern(self, writer: str | None) -> str:
        """Return the glob pattern of a writer's segments, or of all."""
        return f"{PREFIX}{self.run}-{'*' if writer is None else re.sub(r'[^A-Za-z0-9_.]', '.', writer)}-*"


class Segments(Named):
    """Segments that are files of one folder."""

    def __init__(self, run: str, writer: str, folder: Path | None = None) -> None:
        """Use shared memory, or another folder."""
        super().__init__(run, writer)
        self.folder = folder or shared_folder()

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes. Raises OSError where memory is full."""
        size, pieces = laid_out(frames)
        name = self.next_name()
        handle = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Not through a mapping: that fills every page with zeros first, and full memory ends the process by SIGBUS.
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
        """Return the frames of a segment as read-only views, which keep the memory even when the segment is unlinked.

        Raises FileNotFoundError for one that was evicted, ValueError for what is no segment's name.
        """
        handle = os.open(self.folder / allowed(name), os.O_RDONLY)
        try:
            return split(memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ)))
        finally:
            os.close(handle)

    def unlink(self, names: Collection[str]) -> None:
        """Free segments once their last reader lets go; those that are gone already are left at that."""
        for name in names:
            (self.folder / allowed(name)).unlink(missing_ok=True)

    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of all segments of the run on this node, or those of one writer."""
        return sorted(path.name for path in self.folder.glob(self.pattern(writer)))


class RedisStorage(Named):
    """Segments that are values of a Redis server, which its processes reach by one connection each."""

    def __init__(self, run: str, writer: str, address: str) -> None:
        """Connect. Raises UserError where the package, or a server at the address, is missing."""
        super().__init__(run, writer)
        try:
            # Imported here: Redis is an extra.
            import redis
        except ImportError:
            raise UserError("storage redis:// needs the package redis; pip install 'braidrl[redis]'") from None
        self._server = redis.Redis.from_url(address)
        try:
            self._server.ping()
        except redis.ConnectionError as error:
            raise UserError(f"storage {address}: no Redis server answers there ({error})") from None

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes."""
        content, name = join(frames), self.next_name()
        self._server.set(name, memoryview(content))
        return name, len(content)

    def read(self, name: str) -> list[memoryview]:
        """Return the frames of a copy of a segment. Raises as `StorageBackend.read` does."""
        content = self._server.get(allowed(name))
        if content is None:
            raise FileNotFoundError(name)
        assert isinstance(content, bytes)
        return split(memoryview(content))

    def unlink(self, names: Collection[str]) -> None:
        """Free segments; those that are gone already are left at that."""
        if wanted := [allowed(name) for name in names]:
            self._server.unlink(*wanted)

    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of all segments of the run, or those of one writer."""
        return sorted(name.decode() for name in self._server.scan_iter(match=self.pattern(writer)))


def check_storage(storage: str) -> None:
    """Run the contract of storage backends on one of them; what its own test calls. Raises AssertionError where it fails."""
    one, two = (open_storage(storage, "c0ffee", writer) for writer in ("one", "two/slash"))
    frames = [b"", b"first", bytes(range(256)) * 300]
    try:
        name, size = one.write(frames)
        other, _ = two.write([b"other"])
        assert size >= sum(map(len, frames)) and name != other, "segments have names of their own, and their size"
        assert [bytes(frame) for frame in two.read(name)] == frames, "what one process wrote another reads"
        assert one.names() == sorted([name, other]) and one.names("two/slash") == [other], (
            "a writer's segments are found"
        )
        read = two.read(name)
        one.unlink([name, name])
        assert [bytes(frame) for frame in read] == frames, "what was read stays when the segment is unlinked"
        assert one.names() == [other], "an unlinked segment is gone"
        for call in (lambda: two.read(name), lambda: two.read("../etc/passwd"), lambda: two.unlink(["../etc/passwd"])):
            try:
                call()
            except (FileNotFoundError, ValueError):
                continue
            raise AssertionError("a segment that is gone, or what is no segment's name, is refused")
    finally:
        one.unlink(one.names())

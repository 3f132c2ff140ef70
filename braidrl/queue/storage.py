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
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.data.messages import Frame, laid_out, split

NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


class Place(NamedTuple):
    """The description of a node for its processes: its name, the run's name, its server's address, and the storage."""

    host: str
    run: str
    address: str
    storage: str = "shared_memory"


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

"""Storage of payload in the memory of the node that wrote it; readers on other nodes get their rows from that node's server.

same node     read ──▶ segment, as views
another node  read ──▶ that node's server ──▶ the named columns of the requested rows, as frames

A segment is a file in shared memory, written once, whole, by one process, and read until it is unlinked. Its name,
braid-<run>-<writer>-<n>, contains the run and the writing process, so that all segments of either can be found.

/dev/shm/braid-<run>.owner     locked by the run's main process for its lifetime

The owner removes all segments at the end, whichever process wrote them. A later run that finds an unlocked owner file removes the
segments of the killed run.
"""

import fcntl
import itertools
import mmap
import os
import re
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.data.messages import Frame, laid_out, split

NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


class Place(NamedTuple):
    """The description of a node for its processes: its name, the run's name, and its server's address."""

    host: str
    run: str
    address: str


class Segments:
    """One process's access to the segments of a run on its node."""

    def __init__(self, run: str, writer: str, folder: Path | None = None) -> None:
        """Begin with number 0; `writer` separates the segments of processes. `folder` replaces shared memory."""
        self.run, self.writer, self._numbers = run, writer, itertools.count()
        self.folder = folder or shared_folder()

    def _pattern(self, writer: str | None) -> str:
        """Return the glob pattern of a writer's segments, or of all."""
        return f"{PREFIX}{self.run}-{'*' if writer is None else re.sub(r'[^A-Za-z0-9_.]', '.', writer)}-*"

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """Write a new segment with these frames; return its name and size in bytes. Raises OSError if there is no room."""
        size, pieces = laid_out(frames)
        name = self._pattern(self.writer).replace("*", str(next(self._numbers)))
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
        """Return the frames of a segment as read-only views, which keep the memory even after it is unlinked.

        Raises FileNotFoundError after its removal, ValueError for an invalid name.
        """
        handle = os.open(self.folder / allowed(name), os.O_RDONLY)
        try:
            return split(memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ)))
        finally:
            os.close(handle)

    def unlink(self, names: Collection[str]) -> None:
        """Free segments after their last reader; missing ones are ignored. Raises ValueError for an invalid name."""
        for name in names:
            (self.folder / allowed(name)).unlink(missing_ok=True)

    def names(self, writer: str | None = None) -> list[str]:
        """Return the names of the run's segments, of all writers or of one."""
        return sorted(path.name for path in self.folder.glob(self._pattern(writer)))


def allowed(name: str) -> str:
    """Return a valid segment name. It came over the wire and must not lead outside the folder. Raises ValueError for any other."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment's name")
    return name


class Owner:
    """The owner of a run's shared memory on this node: chooses the run's name, and frees everything at the end."""

    def __init__(self, folder: Path | None = None) -> None:
        """First remove the remains of killed runs."""
        self.folder = folder or shared_folder()
        remove_abandoned(self.folder)
        self.run = secrets.token_hex(6)
        self.path = self.folder / f"{PREFIX}{self.run}.owner"
        self._handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def close(self) -> None:
        """Free every segment of the run, whichever process wrote it. The run's processes must have ended."""
        remove_run(self.folder, self.run)
        os.close(self._handle)


def remove_run(folder: Path, run: str) -> None:
    """Free everything with the run's name."""
    segments = Segments(run, "remover", folder)
    segments.unlink(segments.names())
    (folder / f"{PREFIX}{run}.owner").unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> list[str]:
    """Free the remains of runs without an owner; return their names."""
    removed = []
    for path in folder.glob(f"{PREFIX}*.owner"):
        run = path.name.removeprefix(PREFIX).removesuffix(".owner")
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # The run has ended since the listing, and removed its own files.
        except PermissionError:
            continue  # Another user's run: only that user's next run can remove its files.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its owner lives and holds the lock, so nothing is abandoned.
        else:
            remove_run(folder, run)
            removed.append(run)
        finally:
            os.close(handle)
    return removed

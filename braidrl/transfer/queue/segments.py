"""Shared memory of one node: each segment is written once by whoever makes it, read as views, and unlinked when it is evicted.

/dev/shm/braid-<run>.owner             locked by the run's main program for as long as it lives
/dev/shm/braid-<run>-<writer>-<n>      one segment

A segment carries its run in its name, so that the owner can remove all of them at its end whoever wrote them; and a later run,
finding an owner file that nobody locks, removes what a killed run left.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from braidrl.data.frames import Frame, laid_out, split

SHARED = Path("/dev/shm")
PREFIX = "braid-"
NAME = re.compile(r"braid-[0-9a-f]+-[A-Za-z0-9_.]+-[0-9]+")


def shared_folder() -> Path:
    """Where files live in memory; a system without such a place has them on disk."""
    return SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())


class Segments:
    """Makes and reads the segments of one run on this node. `writer` tells the segments of processes apart."""

    def __init__(self, run: str, writer: str, folder: Path | None = None) -> None:
        self.run, self.folder = run, folder or shared_folder()
        self.writer = re.sub(r"[^A-Za-z0-9_.]", ".", writer)
        self._numbers = itertools.count()

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        """A new segment with these frames; its name and size in bytes. Raises OSError where memory is full."""
        size, pieces = laid_out(frames)
        name = f"{PREFIX}{self.run}-{self.writer}-{next(self._numbers)}"
        handle = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Not through a mapping: that fills every page with zeros first, and full memory ends the process by SIGBUS.
            os.ftruncate(handle, size)
            for start, piece in pieces:
                written = 0
                while written < piece.nbytes:
                    written += os.pwrite(handle, piece[written:], start + written)
        except BaseException:
            self.unlink([name])
            raise
        finally:
            os.close(handle)
        return name, size

    def read(self, name: str) -> list[memoryview]:
        """The frames of a segment as read-only views, which keep the memory even when the segment is unlinked.

        Raises FileNotFoundError for one that was evicted, ValueError for what is no segment's name.
        """
        handle = os.open(self._path(name), os.O_RDONLY)
        try:
            return split(memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ)))
        finally:
            os.close(handle)

    def unlink(self, names: Collection[str]) -> None:
        """Frees segments once their last reader lets go; those that are gone already are left at that."""
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def names(self, writer: str | None = None) -> list[str]:
        """All segments of the run on this node, or those of one writer."""
        chosen = "*" if writer is None else re.sub(r"[^A-Za-z0-9_.]", ".", writer)
        return sorted(path.name for path in self.folder.glob(f"{PREFIX}{self.run}-{chosen}-*"))

    def _path(self, name: str) -> Path:
        # A name comes over the wire: it must not lead anywhere else.
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no segment's name")
        return self.folder / name


class Owner:
    """Owns a run's shared memory on this node: makes the run's name, and at the end leaves nothing of it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Removes what killed runs have left, first."""
        self.folder = folder or shared_folder()
        remove_abandoned(self.folder)
        self.run = secrets.token_hex(6)
        self._path = owner_path(self.folder, self.run)
        self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def close(self) -> None:
        """Unlinks every segment of the run, whoever wrote it. The run's processes must have ended."""
        remove_run(self.folder, self.run)
        os.close(self._handle)


def owner_path(folder: Path, run: str) -> Path:
    return folder / f"{PREFIX}{run}.owner"


def remove_run(folder: Path, run: str) -> None:
    """Unlinks everything that carries the run's name."""
    Segments(run, "remover", folder).unlink(Segments(run, "remover", folder).names())
    owner_path(folder, run).unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> list[str]:
    """Unlinks what runs have left whose owner is gone; returns their names."""
    removed = []
    for path in folder.glob(f"{PREFIX}*.owner"):
        run = path.name.removeprefix(PREFIX).removesuffix(".owner")
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # The run has ended since it was listed, and removed what was its own.
        except PermissionError:
            continue  # Another user's run: its files cannot be removed by this one, but by that user's next run.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its owner lives, and holds the lock as long as it does: nothing of it is abandoned.
        else:
            remove_run(folder, run)
            removed.append(run)
        finally:
            os.close(handle)
    return removed

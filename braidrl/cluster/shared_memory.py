"""The folder of a machine for files in memory, which processes map."""

import os
import tempfile
from pathlib import Path

SHARED = "/dev/shm"
PREFIX = "braid-"
"""The files of runs begin with it."""


def shared_folder() -> Path:
    """Return the folder for files in memory: BRAID_SHARED_MEMORY, otherwise /dev/shm; else a folder on disk."""
    folder = Path(os.environ.get("BRAID_SHARED_MEMORY", SHARED))
    # A folder on a read-only file system exists, but cannot be written to.
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def machine() -> str:
    """Return an identifier shared by exactly the processes that share memory."""
    about = os.stat(shared_folder())
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.is_file() else os.uname().nodename} {about.st_dev} {about.st_ino}"


def write_at(handle: int, data: memoryview, start: int) -> None:
    """Write all bytes at an offset of an open file.

    Raises OSError if the memory or disk is full. A mapping would first fill every page with zeros, and full memory
    would end the process by SIGBUS.
    """
    while data:
        written = os.pwrite(handle, data, start)
        data, start = data[written:], start + written

"""Listening sockets of processes: a run must not leave any behind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from braidrl.cluster.watchdog import descendants

STATE, INODE, LISTEN = 3, 9, "0A"
"""Columns of the kernel's table of TCP sockets, and its code for a listening socket."""


def open_sockets(processes: Iterable[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports that these processes listen on."""
    chosen = set(processes)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.pid in chosen
    }


def listening(processes: Iterable[int] | None = None) -> set[int]:
    """Return the inodes of the sockets that these processes listen on; without `processes`, of the whole machine.

    Another program may soon reuse a port that a run has left, but an inode is not reused so soon.
    """
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    result = {int(fields[INODE]) for fields in sockets if fields[STATE] == LISTEN}
    return result if processes is None else result & {inode for process in processes for inode in sockets_of(process)}


def sockets_of(process: int) -> Iterator[int]:
    """Yield the inode of each socket that a process has open."""
    with suppress(OSError):
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(entry).partition(":")
                if kind == "socket":
                    yield int(inode.strip("[]"))


def family(process: int | None = None) -> list[int]:
    """Return a process and all of its descendants; by default of this process, without the Ray cluster that tests
    share.

    The cluster starts and ends workers at any time.
    """
    root = psutil.Process(process or os.getpid())
    children = [child for child in root.children() if process or not is_rays(child)]
    return [root.pid, *(each for child in children for each in (child.pid, *descendants(child.pid)))]


def is_rays(process: psutil.Process) -> bool:
    """Return whether a process belongs to a Ray cluster."""
    with suppress(psutil.NoSuchProcess):
        # A fresh fork server has its `sys.path`, with folders of Ray, in the program after `-c`.
        return any(word.startswith("/") and "/ray/" in word for word in process.cmdline())
    return False

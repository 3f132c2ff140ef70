"""Ports that processes listen on: after a run none of its own may be left."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil

from braidrl.cluster.silence import descendants


def open_sockets(processes: Iterable[int] | None = None) -> set[tuple[str, int]]:
    """Addresses and ports that these processes listen on; without `processes` those of the whole machine."""
    chosen = None if processes is None else set(processes)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and (chosen is None or connection.pid in chosen)
    }


def listening(processes: Iterable[int] | None = None) -> set[int]:
    """Ports of `open_sockets`."""
    return {port for _, port in open_sockets(processes)}


def family(process: int | None = None) -> list[int]:
    """A process and all that it has started; by default this one, without the Ray cluster that tests share.

    That starts and ends workers at any time.
    """
    root = psutil.Process(process or os.getpid())
    children = [child for child in root.children() if process or not is_rays(child)]
    return [root.pid, *(each for child in children for each in (child.pid, *descendants(child.pid)))]


def is_rays(process: psutil.Process) -> bool:
    """Whether a process is one of those that a Ray cluster consists of."""
    with suppress(psutil.NoSuchProcess):
        return any("/ray/" in word for word in process.cmdline())
    return False

"""Ports that processes listen on: after a run none of its own may be left."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil


def listening(processes: Iterable[int] | None = None) -> set[int]:
    """Ports that these processes listen on; without `processes` those of the whole machine."""
    chosen = None if processes is None else set(processes)
    return {
        connection.laddr.port
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and (chosen is None or connection.pid in chosen)
    }


def family(process: int | None = None) -> list[int]:
    """A process, by default this one, and all that it has started."""
    root = psutil.Process(process or os.getpid())
    return [root.pid, *(child.pid for child in root.children(recursive=True))]

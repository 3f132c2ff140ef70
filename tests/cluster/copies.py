"""Code for copies of the fork server under test. It imports little, because fresh interpreters import it again."""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
from typing import Any

from braidrl.cluster.local import from_server
from braidrl.cluster.process import ProcessSpec


def seen(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a copy: the command's modules, its open file, garbage collection, and the state of the copy's
    own copy.
    """
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    there = [name for name in ("told_apart", "json.tool") if name in sys.modules]
    result: dict[str, Any] = {"modules": there, "holds": arguments["file"] in files, "collects": gc.isenabled()}
    if not arguments.get("last"):
        process = from_server(ProcessSpec("echo-1", f"{__name__}:seen", {**arguments, "last": True}))
        assert process.wait(60) and process.outcome
        result["next"] = process.outcome.result
        process.close()
    return result


def overheard(arguments: Any) -> int:
    """Write to a stream that the command has opened; return how many of many new sockets received that."""
    pairs = [socket.socketpair() for _ in range(20)]
    log: Any = sys.modules["log"]
    log.write("said\n")
    log.flush()
    return len(select.select([end for pair in pairs for end in pair], [], [], 0.5)[0])

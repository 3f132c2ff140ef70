"""A rank from its inside: joins the others, does its task, and says how it ended."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from braidrl.cluster.rank_process import RankFailure, failure_message
from braidrl.cluster.world import LostPeers, World, join
from braidrl.errors import UserError

FAILED = 1
at_end: list[Callable[[], None]] = []
"""What has to be called before a rank ends that nobody waits for any more: it ends the processes that the rank started."""


def main(descriptor: int) -> None:
    """Does the one task that comes over the pipe. Ends when the task does, or when the launcher is gone."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    message = json.loads(connection.recv_bytes())
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    # Until the run takes interrupts itself, one ends the rank like any failure.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A thread of Ray's, in which it is blocked, may have started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    failed: RankFailure | None = None
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    result: Any = None
    try:
        world = join(message["limit_s"], message["task"].get("cuda", False))
        result = entry_of(message["entry"])(world, message["task"])
        world.gather("the end of the run", b"")
    except BaseException as error:
        failed = failure_of(world, error)
    # Failed or not, the answer is the last word; the launcher may be gone before it is heard.
    with contextlib.suppress(OSError):
        connection.send_bytes(failure_message(failed) if failed else json.dumps({"result": result}).encode())
    if failed is None:
        world.close()
    end_at_once(FAILED if failed else 0)


def entry_of(name: str) -> Callable[[World, dict[str, Any]], Any]:
    """The function of this package that `module:function` names."""
    module, _, function = name.partition(":")
    entry: Callable[[World, dict[str, Any]], Any] = getattr(importlib.import_module(module), function)
    return entry


def failure_of(world: World, error: BaseException) -> RankFailure:
    """The error as the launcher reports it: where it happened, on which rows, with the traceback."""
    if isinstance(error, UserError):
        return RankFailure(world.rank, "user", str(error))
    if isinstance(error, KeyboardInterrupt):
        return RankFailure(world.rank, "interrupted", "")
    where = f"rank {world.rank} failed in {world.place}" + (f" on rows {world.rows}" if world.rows else "")
    text = "".join(traceback.format_exception(error)).rstrip()
    kind = f"{type(error).__name__}: {error}".splitlines()[0]
    return RankFailure(world.rank, "error", f"{where}: {kind}\n{text}", follows=isinstance(error, LostPeers))


def end_with(connection: Connection) -> None:
    """Ends this process as soon as the launcher closes its end of the pipe, whatever the main thread waits for."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    end_at_once()


def end_at_once(status: int = FAILED) -> NoReturn:
    """Ends without waiting for other ranks, which may be stuck, or for threads of libraries; what this one started ends first."""
    try:
        for call in at_end:
            call()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)

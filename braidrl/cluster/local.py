"""Processes on this machine: started quickly, watched, and ended with the process that started them.

They come from multiprocessing's fork server, a process that has imported the code once and has computed nothing: a worker, or one
that takes a dead one's place, is there in a moment, and no thread or device of the run's own process is copied into it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import msgpack

from braidrl.cluster.rank_process import LOOPBACK
from braidrl.cluster.workers import END_LIMIT_S, Arguments, Main, RankFailure, Worker, failure_of
from braidrl.placement.pools import Pool


class LocalProcess(Worker):
    """A worker that is a process of this machine."""

    def __init__(self, name: str, main: Main, arguments: Arguments, orphaned: Main | None = None) -> None:
        """`orphaned(arguments)` runs there when the process that started it is gone, just before the worker ends too."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([main.__module__])
        self.name = name
        self._told, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(main, dict(arguments), orphaned, theirs), name=name, daemon=False
        )
        with main_module_hidden():
            self._process.start()
        theirs.close()
        self._failure: RankFailure | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def failure(self) -> RankFailure | None:
        if self._failure is None and not self._told.closed and self._told.poll():
            try:
                self._failure = msgpack.unpackb(self._told.recv_bytes())
            except EOFError:
                self._told.close()
        return self._failure

    def describe_end(self) -> str:
        code = self._process.exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self._process.join(limit_s)
        if self.alive:
            self.kill()
        self._told.close()
        self._process.close()


class LocalLauncher:
    """Workers on this machine."""

    ip = LOOPBACK
    node = "here"

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        """All share the machine's cores."""
        return max(1, (os.cpu_count() or 1) // sum(pool.workers for pool in pools))

    def serve(self, service: type) -> list[Any]:
        return []

    def start(
        self, pool: str, number: int, main: Main, arguments: Callable[[str], Arguments], orphaned: Main | None
    ) -> Worker:
        return LocalProcess(f"{pool}-{number}", main, arguments(self.node), orphaned)

    def close(self) -> None:
        """Each worker is closed by whoever has started it."""


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keeps multiprocessing from running the user's main script again in every worker, which asks scripts for a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(main: Main, arguments: Arguments, orphaned: Main | None, told: Connection) -> None:
    # Ctrl-C reaches every process of a terminal; the one that started this one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(orphaned, arguments), daemon=True).start()
    failure = failure_of(main, arguments)
    if failure is not None:
        told.send_bytes(msgpack.packb(failure))
    told.close()


def _watch_parent(orphaned: Main | None, arguments: Arguments) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if orphaned is not None:
        orphaned(arguments)
    os._exit(1)

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
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import msgpack

from braidrl.errors import UserError

END_LIMIT_S = 10.0
"""How long processes have to end by themselves before they are killed."""

Main = Callable[[Mapping[str, Any]], None]


class WorkerFailed(RuntimeError):
    """A worker raised; the text holds its own traceback."""


class LocalProcess:
    """One process that runs `main(arguments)`, both of which must be importable or plain data."""

    def __init__(
        self,
        name: str,
        main: Main,
        arguments: Mapping[str, Any],
        orphaned: Main | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """`orphaned(arguments)` runs there when the process that started it is gone, just before the worker ends too."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.name = name
        self._told, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(main, dict(arguments), orphaned, theirs), name=name, daemon=False
        )
        with main_module_hidden():
            self._process.start()
        theirs.close()
        self._failure: dict[str, str] | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def ended_well(self) -> bool:
        return not self.alive and self._process.exitcode == 0 and self.failure is None

    @property
    def failure(self) -> dict[str, str] | None:
        """What it raised, as `kind` (user or worker) and `text`; None for one that works, ended or was killed."""
        if self._failure is None and not self._told.closed and self._told.poll():
            try:
                self._failure = msgpack.unpackb(self._told.recv_bytes())
            except EOFError:
                self._told.close()
        return self._failure

    def raise_failure(self) -> None:
        """Raises what the process raised: UserError for a user's mistake, WorkerFailed with its traceback for all else."""
        failure = self.failure
        if failure is not None:
            if failure["kind"] == "user":
                raise UserError(failure["text"])
            raise WorkerFailed(f"{self.name} failed:\n{failure['text']}")

    def describe_end(self) -> str:
        """Why it is gone, in a few words."""
        code = self._process.exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """Ends it at once and waits until it is gone."""
        self._process.kill()
        self._process.join()

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Waits until it has ended, and kills it when that takes too long."""
        self._process.join(limit_s)
        if self.alive:
            self.kill()
        self._told.close()
        self._process.close()


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keeps multiprocessing from running the user's main script again in every worker, which asks scripts for a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(main: Main, arguments: Mapping[str, Any], orphaned: Main | None, told: Connection) -> None:
    # Ctrl-C reaches every process of a terminal; the one that started this one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(orphaned, arguments), daemon=True).start()
    try:
        main(arguments)
    except UserError as error:
        told.send_bytes(msgpack.packb({"kind": "user", "text": str(error)}))
    except BaseException:
        told.send_bytes(msgpack.packb({"kind": "worker", "text": traceback.format_exc()}))
    finally:
        told.close()


def _watch_parent(orphaned: Main | None, arguments: Mapping[str, Any]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if orphaned is not None:
        orphaned(arguments)
    os._exit(1)

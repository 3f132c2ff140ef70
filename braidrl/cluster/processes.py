"""Starts the ranks of a run, hands each its task, and sees to it that all end together.

launcher ──task──▶ rank 0 ... rank N-1        each a process of its own, on this machine unless other `RankLauncher` are given
         ◀──result or failure──

A failure in one rank stops the others; what the user sees is the failure that came first and not what followed from it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from braidrl.cluster.rank_process import LOOPBACK, RankFailure, RankProcess, answer_of, environment_of, start, stop
from braidrl.errors import UserError, WorkerError

SETTLING_S = 3.0
"""After a rank has lost its peers: how long to wait for the failure that it follows from."""
PATIENCE = 2
"""Interrupts that are passed on; at the next one the ranks are killed."""


class RankLauncher(Protocol):
    """The ranks of a run, as whoever waits for them sees them."""

    def start(self, message: Mapping[str, Any], workers: int) -> None:
        """Starts them and hands each the message."""

    def answers(self, seconds: float | None) -> dict[int, Any]:
        """Last words that have come within so many seconds, each once: by rank a result, or a RankFailure. None waits for one."""

    def interrupt(self) -> None:
        """Passes Ctrl-C on to every rank. May be called at any moment, as signal handlers are."""

    def stop(self) -> None:
        """Ends every rank that still runs. Afterwards none is left."""


def run_ranks(
    entry: str, task: Mapping[str, Any], workers: int, limit_s: float, ranks: RankLauncher | None = None
) -> Any:
    """Runs `module:function(world, task)` in `workers` processes and returns what rank 0 returned, a JSON value.

    They start on this machine unless other `ranks` say otherwise. Raises the failure of the rank that failed first: UserError,
    WorkerError, or KeyboardInterrupt. None of the processes is left.
    """
    ranks = ranks or LocalRanks()
    try:
        with forwarded_interrupts(ranks):
            ranks.start({"entry": entry, "task": task, "limit_s": limit_s}, workers)
            return outcome(ranks, workers)
    finally:
        ranks.stop()


class LocalRanks:
    """Ranks that are processes of this machine."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._ranks: list[RankProcess] = []
        self._silent: dict[Connection, RankProcess] = {}

    def start(self, message: Mapping[str, Any], workers: int) -> None:
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        for rank in range(workers):
            meeting = environment_of(rank, workers, LOOPBACK, self._store.port, device=rank)
            self._ranks.append(start(rank, meeting, message))
            self._silent[self._ranks[-1].connection] = self._ranks[-1]

    def answers(self, seconds: float | None) -> dict[int, Any]:
        spoken = [self._silent.pop(connection) for connection in wait(list(self._silent), seconds)]  # type: ignore[call-overload]
        return {rank.rank: answer_of(rank) for rank in spoken}

    def interrupt(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGINT)

    def stop(self) -> None:
        stop(self._ranks)
        # A traceback would keep the store, and with it its port.
        self._store = None


def outcome(ranks: RankLauncher, workers: int) -> Any:
    """Waits until every rank is done; rank 0's result. Raises the first failure."""
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    deadline: float | None = None
    while len(results) + len(failures) < workers:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        answers = ranks.answers(left)
        results |= {rank: answer for rank, answer in answers.items() if not isinstance(answer, RankFailure)}
        failures += [answer for answer in answers.values() if isinstance(answer, RankFailure)]
        if any(failure.is_cause for failure in failures) or (left is not None and not answers):
            break
        # Interrupted ranks are waited for as long as they take: one of them saves.
        if deadline is None and any(failure.follows for failure in failures):
            deadline = time.monotonic() + SETTLING_S
    if failures:
        raise error_of(failures)
    return results[0]


def error_of(failures: list[RankFailure]) -> BaseException:
    """The exception for the failure that the others follow from. An interrupt counts only where nothing failed."""
    failure = min(failures, key=lambda f: (f.follows, f.kind == "interrupted"))
    if failure.kind == "user":
        return UserError(failure.message)
    if failure.kind == "interrupted":
        return KeyboardInterrupt()
    return WorkerError(failure.message)


@contextlib.contextmanager
def forwarded_interrupts(ranks: RankLauncher) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the ranks, which save and end together; then the launcher ends as they did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > PATIENCE:
            raise KeyboardInterrupt
        ranks.interrupt()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Starts the ranks of a run on this machine, hands each its task, and sees to it that all end together.

launcher ──task as JSON──▶ rank 0 ... rank N-1        each a process of its own, in a session of its own
         ◀──result or failure──                       a pipe that ends is the end of whoever is at its other end

A failure in one rank stops the others; what the user sees is the failure that came first and not what followed from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import torch.distributed as dist

from braidrl.errors import UserError, WorkerError

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from braidrl.cluster.rank import main
main(int(sys.argv[1]))
"""
SETTLING_S = 3.0
"""After a rank has lost its peers: how long to wait for the failure that it follows from."""
STOPPING_S = 5.0
"""How long a rank has to end once it is told to; then it is killed."""


PATIENCE = 2
"""Interrupts that are passed on; at the next one the ranks are killed."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended that was not done. `follows` where it only noticed that others were gone."""

    rank: int
    kind: str
    """user, error, interrupted or died."""
    message: str
    follows: bool = False

    @property
    def is_cause(self) -> bool:
        """True for what ends the run at once."""
        return not self.follows and self.kind != "interrupted"


@dataclass
class RankProcess:
    """A rank as the launcher sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def signal(self, number: int) -> None:
        # The number cannot have become another's: nobody has waited for the process yet.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def run_ranks(entry: str, task: Mapping[str, Any], workers: int, limit_s: float) -> Any:
    """Runs `module:function(world, task)` in `workers` processes and returns what rank 0 returned, a JSON value.

    Raises the failure of the rank that failed first: UserError, WorkerError, or KeyboardInterrupt. None of the processes is left.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[RankProcess] = []
    try:
        with forwarded_interrupts(ranks):
            for rank in range(workers):
                ranks.append(start(rank, workers, store.port, {"entry": entry, "task": task, "limit_s": limit_s}))
            return outcome(ranks)
    finally:
        stop(ranks)
        # A traceback would keep the store, and with it its port.
        del store


def start(rank: int, workers: int, port: int, message: Mapping[str, Any]) -> RankProcess:
    """A fresh process, and not a copy of this one: nothing of torch's threads is forked and no main script runs again."""
    ours, theirs = Pipe()
    threads = max(1, (os.cpu_count() or 1) // workers)
    environment = {
        "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
    )  # fmt: skip
    theirs.close()
    started = RankProcess(rank, process, ours)
    with contextlib.suppress(OSError):  # a process that is gone already shows when its answer is awaited
        ours.send_bytes(json.dumps(message).encode())
    return started


def outcome(ranks: list[RankProcess]) -> Any:
    """Waits until every rank is done; rank 0's result. Raises the first failure."""
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    open_ranks = {rank.connection: rank for rank in ranks}
    while open_ranks:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_ranks), left)
        for connection in ready:
            rank = open_ranks.pop(connection)  # type: ignore[call-overload]
            answer = answer_of(rank)
            if isinstance(answer, Failure):
                failures.append(answer)
            else:
                results[rank.rank] = answer
        if any(failure.is_cause for failure in failures) or (left is not None and not ready):
            break
        # Interrupted ranks are waited for as long as they take: one of them saves.
        if deadline is None and any(failure.follows for failure in failures):
            deadline = time.monotonic() + SETTLING_S
    if failures:
        raise error_of(failures)
    return results[0]


def answer_of(rank: RankProcess) -> Any:
    """What the rank sent last: its result, or its failure."""
    try:
        message = json.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        status = rank.process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return Failure(rank.rank, "died", f"rank {rank.rank} {how}, without a word")
    if "failure" in message:
        return Failure(**message["failure"])
    return message["result"]


def error_of(failures: list[Failure]) -> BaseException:
    """The exception for the failure that the others follow from. An interrupt counts only where nothing failed."""
    failure = min(failures, key=lambda f: (f.follows, f.kind == "interrupted"))
    if failure.kind == "user":
        return UserError(failure.message)
    if failure.kind == "interrupted":
        return KeyboardInterrupt()
    return WorkerError(failure.message)


def stop(ranks: list[RankProcess]) -> None:
    """Ends every rank that still runs: the end of its pipe tells it, a kill follows. Afterwards none is left."""
    for rank in ranks:
        rank.connection.close()
    deadline = time.monotonic() + STOPPING_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.signal(signal.SIGKILL)
            rank.process.wait()


@contextlib.contextmanager
def forwarded_interrupts(ranks: list[RankProcess]) -> Iterator[None]:
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
        for rank in ranks:
            rank.signal(signal.SIGINT)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure_message(failure: Failure) -> bytes:
    """What a rank sends in place of a result."""
    return json.dumps({"failure": asdict(failure)}).encode()

"""One rank as a process of this machine: how it is started, what it said last, how it is ended.

start ──task as JSON──▶ rank        a pipe that ends is the end of whoever is at its other end
      ◀──result or failure──
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from braidrl.cluster.rank import main
main(int(sys.argv[1]))
"""
LOOPBACK = "127.0.0.1"
STOPPING_S = 5.0
"""How long a rank has to end once it is told to; then it is killed."""


@dataclass(frozen=True)
class RankFailure:
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

    def hang_up(self) -> None:
        """Tells it to end, also while another thread waits for its word, which a mere `close` would wait for."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def environment_of(rank: int, workers: int, address: str, port: int, device: int) -> dict[str, str]:
    """What a rank is told of the others; `device` is the number of its own among those that it sees."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(device), "WORLD_SIZE": str(workers),
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def start(rank: int, meeting: Mapping[str, str], message: Mapping[str, Any]) -> RankProcess:
    """A fresh process, and not a copy of this one: nothing of torch's threads is forked and no main script runs again."""
    ours, theirs = Pipe()
    threads = max(1, (os.cpu_count() or 1) // int(meeting["WORLD_SIZE"]))
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if meeting["MASTER_ADDR"] == LOOPBACK else {}
    environment = {"OMP_NUM_THREADS": str(threads), **interface, **os.environ, **meeting}
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
    )  # fmt: skip
    theirs.close()
    started = RankProcess(rank, process, ours)
    with contextlib.suppress(OSError):  # a process that is gone already shows when its answer is awaited
        ours.send_bytes(json.dumps(message).encode())
    return started


def answer_of(rank: RankProcess) -> Any:
    """What the rank sent last: its result, or its failure."""
    try:
        message = json.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        status = rank.process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return RankFailure(rank.rank, "died", f"rank {rank.rank} {how}, without a word")
    if "failure" in message:
        return RankFailure(**message["failure"])
    return message["result"]


def stop(ranks: Sequence[RankProcess]) -> None:
    """Ends every rank that still runs: the end of its pipe tells it, a kill follows. Afterwards none is left."""
    for rank in ranks:
        rank.hang_up()
    deadline = time.monotonic() + STOPPING_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.signal(signal.SIGKILL)
            rank.process.wait()


def failure_message(failure: RankFailure) -> bytes:
    """What a rank sends in place of a result."""
    return json.dumps({"failure": asdict(failure)}).encode()

"""The processes that follow an engine's leader, forked by it before it has computed anything.

leader ──commands, over a pipe──▶ follower        a pipe that ends is the end of the leader, and so of the follower
       ◀──"" when done, or an error─┘
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import msgpack

from braidrl.cluster.local import LOOK_EVERY_S, Forked, fork
from braidrl.rollout.divided.leader import Command, follow
from braidrl.rollout.embedded.engine import EmbeddedEngine

ENDING_S = 2.0
"""How long a failure is looked into: the connections of a process end a moment before it does."""
DONE = ""
FAILED = 1


class ForkedFollowers:
    """Followers 1 to `count`. The leader waits `limit_s` seconds for a word of them."""

    def __init__(self, count: int, begin: Callable[[int, int], EmbeddedEngine], inherited: int, limit_s: float) -> None:
        """`begin` makes a follower's engine, given its rank and the port where ranks meet.

        `inherited` is the descriptor on which the run hears of the leader's end: followers do not keep it.
        """
        self._limit_s = limit_s
        self._processes: list[Forked] = []
        for rank in range(1, count + 1):
            kept = [inherited, *(process.connection.fileno() for process in self._processes)]
            self._processes.append(fork(f"follower {rank}", partial(_run, rank, begin), kept))

    def meet(self, port: int) -> None:
        """Lets them begin."""
        self._send(port)

    def tell(self, commands: Sequence[Command]) -> None:
        self._send(commands)

    def wait(self) -> None:
        deadline = time.monotonic() + self._limit_s
        for pipe in (process.connection for process in self._processes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no word in {self._limit_s:g} s")
            if error := msgpack.unpackb(pipe.recv_bytes()):
                raise RuntimeError(error)

    def describe_end(self, error: Exception) -> str:
        deadline = time.monotonic() + ENDING_S
        while all(process.alive for process in self._processes) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        names = [f"{process.name} (process {process.pid})" for process in self._processes]
        statuses = [process.status for process in self._processes]
        ended = [f"{n} ended; its exit status is {s}" for n, s in zip(names, statuses, strict=True) if s is not None]
        seen = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{'; '.join(ended) or ', '.join(names) + ' was waited for'} ({seen})"

    def close(self) -> None:
        """Ends them at once, whatever they do."""
        for process in self._processes:
            process.kill()

    def _send(self, value: object) -> None:
        message = msgpack.packb(value)
        for process in self._processes:
            process.connection.send_bytes(message)


def _run(rank: int, begin: Callable[[int, int], EmbeddedEngine], pipe: Connection) -> None:
    """A follower from its inside."""
    try:
        engine = begin(rank, msgpack.unpackb(pipe.recv_bytes()))
        pipe.send_bytes(msgpack.packb(DONE))
        while True:
            if follow(engine, msgpack.unpackb(pipe.recv_bytes())):
                pipe.send_bytes(msgpack.packb(DONE))
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        # Whoever waits hears of it; when nobody does, the leader sees that the process has ended.
        with contextlib.suppress(OSError):
            pipe.send_bytes(msgpack.packb(f"{type(error).__name__}: {error}"))
        os._exit(FAILED)

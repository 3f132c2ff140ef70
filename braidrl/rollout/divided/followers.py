"""The processes that follow an engine's leader, forked by it before it has computed anything.

leader ──commands, over a pipe──▶ follower        a pipe that ends is the end of the leader, and so of the follower
       ◀──"" when done, or an error─┘
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgpack
import torch
import torch.distributed as dist

from braidrl.models.parallel.decoding import TensorRanks
from braidrl.rollout.divided.leader import Command, follow
from braidrl.rollout.embedded.engine import EmbeddedEngine

LOOPBACK = "127.0.0.1"
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
        context = multiprocessing.get_context("fork")
        self._limit_s = limit_s
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(1, count + 1):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=_run, args=(rank, begin, theirs, [*self._pipes], inherited))
            process.start()
            theirs.close()
            self._processes.append(process)

    def meet(self, port: int) -> None:
        """Lets them begin."""
        self._send(port)

    def tell(self, commands: Sequence[Command]) -> None:
        self._send(commands)

    def wait(self) -> None:
        deadline = time.monotonic() + self._limit_s
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no word in {self._limit_s:g} s")
            if error := msgpack.unpackb(pipe.recv_bytes()):
                raise RuntimeError(error)

    def describe_end(self, error: Exception) -> str:
        ending = wait([process.sentinel for process in self._processes], timeout=ENDING_S)
        for process in self._processes:
            if process.sentinel in ending:
                process.join(ENDING_S)
        all_of_them = [(f"follower {n} (process {p.pid})", p) for n, p in enumerate(self._processes, 1)]
        ended = [f"{name} ended; its exit status is {p.exitcode}" for name, p in all_of_them if p.exitcode is not None]
        seen = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{'; '.join(ended) or ', '.join(name for name, _ in all_of_them) + ' was waited for'} ({seen})"

    def close(self) -> None:
        """Ends them at once, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()

    def _send(self, value: object) -> None:
        message = msgpack.packb(value)
        for pipe in self._pipes:
            pipe.send_bytes(message)


def _run(
    rank: int,
    begin: Callable[[int, int], EmbeddedEngine],
    pipe: Connection,
    of_leader: Sequence[Connection],
    inherited: int,
) -> None:
    """A follower from its inside. What it kept of the leader's would hide the leader's end from others."""
    for other in of_leader:
        other.close()
    os.close(inherited)
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


def open_port(ranks: int, limit_s: float) -> dist.TCPStore:
    """Where the ranks of an engine meet, on this machine; its leader has it."""
    return dist.TCPStore(LOOPBACK, 0, ranks, is_master=True, timeout=timedelta(seconds=limit_s), wait_for_workers=False)


def join(store: dist.Store, rank: int, ranks: int, limit_s: float, device: torch.device) -> TensorRanks:
    """Meets the other ranks of an engine. Raises RuntimeError, as all that they do together, after `limit_s` seconds in vain."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s),
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return TensorRanks(dist.group.WORLD)

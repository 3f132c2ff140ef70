"""The follower processes of an engine's leader, forked before it has computed anything, and how all of them start.

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
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from braidrl.models.cpu.malloc import keep_freed_memory
from braidrl.models.loading import load_tokenizer
from braidrl.models.parallel.decoding import TensorRanks, load_tensor_parallel
from braidrl.rollout.divided.leader import Command, LeadingEngine, execute
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.process.spec import EngineSpec

LOOPBACK = "127.0.0.1"
ENDING_S = 2.0
"""How long to look for the process that caused a failure: its connections close a moment before it ends."""
DONE = ""
FAILED = 1


class ForkedFollowers:
    """Followers 1 to `count`. The leader waits at most `limit_s` seconds for an answer."""

    def __init__(self, count: int, begin: Callable[[int, int], EmbeddedEngine], inherited: int, limit_s: float) -> None:
        """Fork the followers.

        Args:
            count: How many.
            begin: Makes a follower's engine from its rank and the port of the rendezvous.
            inherited: A descriptor that followers close: on it the run sees the end of the leader.
            limit_s: Seconds to wait for an answer.
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

    def connect(self, port: int) -> None:
        """Tell the followers the port of the rendezvous."""
        self._send(port)

    def send(self, commands: Sequence[Command]) -> None:
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
        """Kill the followers."""
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
    """Run a follower. It closes what it inherited of the leader's, which would hide the leader's end from others."""
    for other in of_leader:
        other.close()
    os.close(inherited)
    try:
        engine = begin(rank, msgpack.unpackb(pipe.recv_bytes()))
        pipe.send_bytes(msgpack.packb(DONE))
        while True:
            if execute(engine, msgpack.unpackb(pipe.recv_bytes())):
                pipe.send_bytes(msgpack.packb(DONE))
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        # Whoever waits hears of it; when nobody does, the leader sees that the process has ended.
        with contextlib.suppress(OSError):
            pipe.send_bytes(msgpack.packb(f"{type(error).__name__}: {error}"))
        os._exit(FAILED)


def open_port(ranks: int, limit_s: float) -> dist.TCPStore:
    """Open the rendezvous store of an engine's ranks on this machine; the leader keeps it."""
    return dist.TCPStore(LOOPBACK, 0, ranks, is_master=True, timeout=timedelta(seconds=limit_s), wait_for_workers=False)


def join(store: dist.Store, rank: int, ranks: int, limit_s: float, device: torch.device) -> TensorRanks:
    """Join the engine's process group. This, and every later collective, raises RuntimeError after `limit_s` seconds without the others."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s),
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return TensorRanks(dist.group.WORLD)


def fork_followers(spec: EngineSpec, inherited: int) -> ForkedFollowers:
    """Fork the followers of an engine; see `ForkedFollowers` for `inherited`."""
    return ForkedFollowers(spec.tensor - 1, partial(_follower, spec), inherited, wait_s(spec))


def lead(spec: EngineSpec, followers: ForkedFollowers) -> LeadingEngine:
    """Make the leader's engine, once every process has loaded its slices.

    Raises UserError for a model that cannot be used, and EngineError for a follower that fails.
    """
    store = open_port(spec.tensor, wait_s(spec))
    followers.connect(store.port)
    ranks = join(store, 0, spec.tensor, wait_s(spec), device_of(spec, 0))
    engine = LeadingEngine(**_parts(spec, ranks), followers=followers)
    engine.await_followers()
    return engine


def _follower(spec: EngineSpec, rank: int, port: int) -> EmbeddedEngine:
    torch.set_num_threads(spec.threads)
    keep_freed_memory()
    limit = timedelta(seconds=wait_s(spec))
    store = dist.TCPStore(LOOPBACK, port, spec.tensor, is_master=False, timeout=limit)
    return EmbeddedEngine(**_parts(spec, join(store, rank, spec.tensor, wait_s(spec), device_of(spec, rank))))


def _parts(spec: EngineSpec, ranks: TensorRanks) -> dict[str, Any]:
    model, slices = load_tensor_parallel(spec.model, getattr(torch, spec.dtype), device_of(spec, ranks.rank), ranks)
    return {
        "model": model, "tokenizer": load_tokenizer(spec.model), "slots": spec.slots,
        "max_sequence_tokens": spec.max_sequence_tokens, "seed": spec.seed, "slices": slices, **spec.options,
    }  # fmt: skip


def device_of(spec: EngineSpec, rank: int) -> torch.device:
    """CUDA device index: the leader's plus this process's rank."""
    device = torch.device(spec.device)
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


def wait_s(spec: EngineSpec) -> float:
    """Seconds that the processes wait for one another: less than the run waits for the leader, which can still say who was missing."""
    return spec.limit_s / 2

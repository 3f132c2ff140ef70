"""Weights over a network: one version, sent in buckets from the run to all workers of an engine, by NCCL on CUDA and gloo on CPUs.

run ──notice: names, shapes, where to meet──▶ engine ──▶ each worker        as the engine is asked for anything else
run ──bucket, bucket, ... to all at once───────────────▶ each worker ──tensor by tensor──▶ the engine's own loader

A group of processes lasts for one version, so that nothing is left of one that failed in the middle. A worker has room for one bucket,
and keeps its part of each tensor.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.rollout.engine import EngineError, WeightSource

BUCKET_BYTES = 256 << 20
ALIGNMENT = 16
"""Tensors begin at multiples of so many bytes in their bucket."""
CHECK_BYTES = 8
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Sent:
    """A tensor on its way."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def bytes(self) -> int:
        """What it takes in a bucket."""
        size = torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Notice:
    """What a worker has to know of a version before it comes; JSON in `plain`."""

    host: str
    port: int
    workers: int
    limit_s: float
    device: str
    """cuda, for NCCL, or cpu, for gloo."""
    checked: bool
    """Whether each bucket ends with a checksum."""
    bucket_bytes: int
    tensors: list[Sent]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Notice:
        return Notice(**{**plain, "tensors": [Sent(**sent) for sent in plain["tensors"]]})

    def buckets(self) -> list[list[Sent]]:
        """Tensors that go together: as many in a row as there is room for, and one that is larger alone."""
        buckets: list[list[Sent]] = []
        room = 0
        for sent in self.tensors:
            if not buckets or sent.bytes > room:
                buckets.append([])
                room = self.bucket_bytes
            buckets[-1].append(sent)
            room -= sent.bytes
        return buckets


class Broadcast:
    """One version on its way to the workers of one engine. `run` sends it, in a thread of its own."""

    def __init__(
        self, weights: WeightSource, workers: int, peer: str, device: torch.device, limit_s: float,
        checked: bool = False, bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        """`peer` is a host of the engine's, to be met under this machine's address that it sees; `device` is the run's."""
        self._weights, self._device, self._cancelled = weights, device, threading.Event()
        host, limit = address_towards(peer), timedelta(seconds=limit_s)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        tensors = [Sent(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights.tensors()]
        self.notice = Notice(host, self._store.port, workers, limit_s, device.type, checked, bucket_bytes, tensors)

    def run(self) -> None:
        """Raises EngineError, naming whom it waited for, where workers do not come or go away."""
        if not self._all_came():
            return
        notice, tensors = self.notice, iter(self._weights.tensors())
        try:
            group = join(self._store, 0, notice)
            for bucket in notice.buckets():
                part = [tensor for _, tensor in (next(tensors) for _ in bucket)]
                group.broadcast(packed(part, bucket, self._device, notice.checked), 0).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise EngineError(f"weights did not reach all of {notice.workers} workers: {first_line(error)}") from error

    def cancel(self) -> None:
        """Workers that have not come need not be waited for."""
        self._cancelled.set()

    def _all_came(self) -> bool:
        """Waits for every worker; False where it was cancelled first."""
        end = time.monotonic() + self.notice.limit_s
        while (came := self._store.add("here", 0)) < self.notice.workers:
            if self._cancelled.wait(LOOK_EVERY_S):
                return False
            if time.monotonic() > end:
                raise EngineError(
                    f"{came} of {self.notice.workers} workers came for weights in {self.notice.limit_s:g} s"
                )
        return True


def received(plain: Mapping[str, Any], worker: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the order in which it was sent, on the worker's device or with gloo on the CPU.

    `worker` counts the engine's workers from 0. What a tensor is a view of is not written to again. Raises ValueError for a bucket
    that is not what was sent.
    """
    notice = Notice.of(plain)
    store = dist.TCPStore(notice.host, notice.port, is_master=False, timeout=timedelta(seconds=notice.limit_s))
    store.add("here", 1)
    group = join(store, worker + 1, notice)
    for bucket in notice.buckets():
        place = device if notice.device == "cuda" else torch.device("cpu")
        buffer = torch.empty(bytes_of(bucket, notice.checked), dtype=torch.uint8, device=place)
        group.broadcast(buffer, 0).wait()
        yield from unpacked(buffer, bucket, notice.checked)


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """What becomes of `work`, which a thread does that nobody has to wait for: a group whose workers are gone may hold it for long."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        # the run may have ended meanwhile
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, failure)

    threading.Thread(target=run, daemon=True).start()
    return done


def join(store: dist.Store, rank: int, notice: Notice) -> Any:
    """A group of the sender, rank 0, and the workers; of no other group's world."""
    limit, store = timedelta(seconds=notice.limit_s), dist.PrefixStore("group", store)
    if notice.device == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, notice.workers + 1, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(notice.host))]
    return dist.ProcessGroupGloo(store, rank, notice.workers + 1, gloo)


def packed(tensors: Sequence[Tensor], bucket: Sequence[Sent], device: torch.device, checked: bool) -> Tensor:
    """The bytes of a bucket (N,), on the device."""
    buffer = torch.zeros(bytes_of(bucket, checked), dtype=torch.uint8, device=device)
    start = 0
    for tensor, sent in zip(tensors, bucket, strict=True):
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + len(values)].copy_(values)
        start += sent.bytes
    if checked:
        buffer[start:].view(torch.int64).fill_(checksum(buffer[:start]))
    return buffer


def unpacked(buffer: Tensor, bucket: Sequence[Sent], checked: bool) -> Iterator[tuple[str, Tensor]]:
    """The reverse of `packed`: views of the buffer."""
    end = len(buffer) - CHECK_BYTES * checked
    if checked and (expected := int(buffer[end:].view(torch.int64))) != (found := checksum(buffer[:end])):
        raise ValueError(f"the weights that arrived have checksum {found:08x}, and {expected:08x} was sent")
    start = 0
    for sent in bucket:
        dtype, shape = getattr(torch, sent.dtype), torch.Size(sent.shape)
        yield sent.name, buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        start += sent.bytes


def bytes_of(bucket: Sequence[Sent], checked: bool) -> int:
    return sum(sent.bytes for sent in bucket) + CHECK_BYTES * checked


def checksum(buffer: Tensor) -> int:
    return zlib.crc32(buffer.cpu().numpy().data)


def address_towards(peer: str) -> str:
    """This machine's address that a host sees. Nothing is sent there."""
    family, *_, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(where)
        address: str = asking.getsockname()[0]
    return address


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

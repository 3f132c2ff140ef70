"""Weights over a network: one version, sent in buckets from the run to all workers of an engine, by NCCL on CUDA and gloo on CPUs.

run ──notice: names, shapes, where to meet──▶ engine ──▶ each worker        as the engine is asked for anything else
run ──bucket, bucket, ... to all at once───────────────▶ each worker ──tensor by tensor──▶ the engine's own loader

A group of processes lasts for one version, so that nothing is left of one that failed in the middle. A worker has room for one bucket,
and keeps its part of each tensor.
"""

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.process_groups import address_towards, connect_store, group_apart, open_store
from braidrl.engines.engine import EngineError, WeightSource
from braidrl.errors import first_line

BUCKET_BYTES = 256 << 20
ALIGNMENT = 16
"""Tensors begin at multiples of so many bytes in their bucket."""
CHECK_BYTES = 8
POLL_S = 0.02


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, type and shape."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def bytes(self) -> int:
        """Return the bytes that it takes in a bucket."""
        size = torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Notice:
    """What a worker must know of a version before it arrives; JSON in `plain`."""

    host: str
    port: int
    workers: int
    limit_s: float
    device: str
    """cuda, for NCCL, or cpu, for gloo."""
    checked: bool
    """Whether each bucket ends with a checksum."""
    bucket_bytes: int
    tensors: list[TensorSpec]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Notice":
        return Notice(**{**plain, "tensors": [TensorSpec(**sent) for sent in plain["tensors"]]})

    def buckets(self) -> list[list[TensorSpec]]:
        """Split the tensors into buckets of consecutive ones; a tensor larger than a bucket goes alone."""
        buckets: list[list[TensorSpec]] = []
        room = 0
        for sent in self.tensors:
            if not buckets or sent.bytes > room:
                buckets.append([])
                room = self.bucket_bytes
            buckets[-1].append(sent)
            room -= sent.bytes
        return buckets


class Broadcast:
    """One version on its way to the workers of one engine; `run` sends it, in a thread of its own."""

    def __init__(
        self, weights: WeightSource, workers: int, peer: str, device: torch.device, limit_s: float,
        checked: bool = False, bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        """Open the rendezvous for `peer`, a host of the engine's; `device` is the run's."""
        self._weights, self._device, self._cancelled = weights, device, threading.Event()
        host = address_towards(peer)
        self._store = open_store(host, limit_s)
        tensors = [
            TensorSpec(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights.tensors()
        ]
        self.notice = Notice(host, self._store.port, workers, limit_s, device.type, checked, bucket_bytes, tensors)

    def run(self) -> None:
        """Send the weights. Raises EngineError, naming whom it waited for, where workers do not come or go away."""
        if not self._await_workers():
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
        """Stop waiting for workers that have not come."""
        self._cancelled.set()

    def _await_workers(self) -> bool:
        """Wait for every worker; returns False where it was cancelled first."""
        end = time.monotonic() + self.notice.limit_s
        while (came := self._store.add("here", 0)) < self.notice.workers:
            if self._cancelled.wait(POLL_S):
                return False
            if time.monotonic() > end:
                raise EngineError(
                    f"{came} of {self.notice.workers} workers came for weights in {self.notice.limit_s:g} s"
                )
        return True


def receive_tensors(plain: Mapping[str, Any], worker: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in the order in which it was sent, on the worker's device, or with gloo on the CPU.

    `worker` counts the engine's workers from 0. A tensor is a view of a bucket that is not written to again. Raises ValueError for a bucket
    whose checksum is wrong.
    """
    notice = Notice.of(plain)
    store = connect_store(notice.host, notice.port, notice.limit_s)
    store.add("here", 1)
    group = join(store, worker + 1, notice)
    for bucket in notice.buckets():
        place = device if notice.device == "cuda" else torch.device("cpu")
        buffer = torch.empty(bytes_of(bucket, notice.checked), dtype=torch.uint8, device=place)
        group.broadcast(buffer, 0).wait()
        yield from unpacked(buffer, bucket, notice.checked)


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run `work` in a daemon thread, and return its future: a group whose workers are gone may block it for long."""
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
    """Make a process group of the sender, rank 0, and the workers, apart from all other groups."""
    address = address_towards(notice.host)
    return group_apart(store, rank, notice.workers + 1, notice.limit_s, notice.device == "cuda", address)


def packed(tensors: Sequence[Tensor], bucket: Sequence[TensorSpec], device: torch.device, checked: bool) -> Tensor:
    """Pack tensors into one bucket (N,) uint8 on the device."""
    buffer = torch.zeros(bytes_of(bucket, checked), dtype=torch.uint8, device=device)
    start = 0
    for tensor, sent in zip(tensors, bucket, strict=True):
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + len(values)].copy_(values)
        start += sent.bytes
    if checked:
        buffer[start:].view(torch.int64).fill_(checksum(buffer[:start]))
    return buffer


def unpacked(buffer: Tensor, bucket: Sequence[TensorSpec], checked: bool) -> Iterator[tuple[str, Tensor]]:
    """Invert `packed`: yield views of the buffer."""
    end = len(buffer) - CHECK_BYTES * checked
    if checked and (expected := int(buffer[end:].view(torch.int64))) != (found := checksum(buffer[:end])):
        raise ValueError(f"the weights that arrived have checksum {found:08x}, and {expected:08x} was sent")
    start = 0
    for sent in bucket:
        dtype, shape = getattr(torch, sent.dtype), torch.Size(sent.shape)
        yield sent.name, buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        start += sent.bytes


def bytes_of(bucket: Sequence[TensorSpec], checked: bool) -> int:
    return sum(sent.bytes for sent in bucket) + CHECK_BYTES * checked


def checksum(buffer: Tensor) -> int:
    return zlib.crc32(buffer.cpu().numpy().data)

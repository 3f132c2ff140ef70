"""A client without the secret cannot connect to a public queue, and no message harms the queue or its clients."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
import zmq

from braidrl.errors import UserError
from braidrl.queue.transfer_queue import TransferQueue
from braidrl.queue.transport import QueueTimeout

ELSEWHERE = "127.0.0.2"
GREETING = b"\xff" + b"\0" * 7 + b"\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
KINDS = 6


def test_public_queue_requires_secret_and_refuses_others() -> None:
    with pytest.raises(UserError, match=r"serve\(ip=..., secret=...\)"):
        TransferQueue.serve({"train": ["x"]}, ip=ELSEWHERE)
    with TransferQueue.serve({"train": ["x"]}, ip=ELSEWHERE, secret="a long secret") as queue:
        for wrong in (None, "another secret"):
            with pytest.raises(QueueTimeout):
                TransferQueue.connect(queue.address, limit_s=0.3, secret=wrong)
        with TransferQueue.connect(queue.address, secret="a long secret") as other:
            other.put({"x": torch.arange(2)}, rows=[0, 1])
            batch = queue.get("train", 2)
            assert batch is not None and batch["x"].tolist() == [0, 1]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_malformed_truncated_and_oversized_messages_harm_nobody(count: int) -> None:
    chance = np.random.default_rng(0)
    with TransferQueue.serve({"train": ["x"]}) as queue, TransferQueue.connect(queue.address) as other:
        addresses = [queue.address, queue.data.address]
        served = serves(queue, other)
        next(served)
        before = 0
        for number in range(count):
            if number == count // 3:
                before = memory()
            send(addresses[number % len(addresses)], number // len(addresses) % KINDS, chance)
            if number % 50 == 0:
                next(served)
        next(served)
        assert memory() - before < 8 << 20, "bytes more than before"
        assert queue.usage()["rows"] == 0


def serves(queue: TransferQueue, other: TransferQueue) -> Iterator[None]:
    """Let a row pass each time."""
    row = 0
    while True:
        queue.put({"x": torch.tensor([row])}, rows=[row])
        batch = other.get("train", 1)
        assert batch is not None and batch["x"].tolist() == [row] and other.done(batch) == []
        row += 1
        yield


def memory() -> int:
    """Bytes that this process, which serves the queue, has for itself."""
    return int(psutil.Process().memory_full_info().uss)


def send(address: str, kind: int, chance: np.random.Generator) -> None:
    """Send something that is no request: garbage frames, half a request, a request of wrong types, or raw bytes on the
    line.
    """
    garbage = [chance.bytes(int(chance.integers(0, 40))) for _ in range(int(chance.integers(1, 4)))]
    if kind == 0:
        tell(address, garbage)
    elif kind == 1:
        tell(address, [b"\x82\xa7request\xa3put\xa6number\x01", *garbage])
    elif kind == 2:
        tell(address, [b"\x83\xa7request\xa3put\xa6num"])
    else:
        oversized = b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 100
        truncated = b"\x00\x20" + b"half"
        ready = b"\x04" + bytes([len(READY)]) + READY
        shout(address, [chance.bytes(64), GREETING + ready + oversized, GREETING + ready + truncated][kind - 3])


def tell(address: str, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(address)
        dealer.send_multipart(frames)


def shout(address: str, content: bytes) -> None:
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=10) as line:
        line.sendall(content)

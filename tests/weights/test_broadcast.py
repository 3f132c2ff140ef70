"""Weights over the network: what is sent in buckets arrives, and nobody waits for who does not come or has gone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.engines.engine import EngineError
from braidrl.weights.broadcast import Broadcast, Notice, TensorSpec, packed, receive_tensors, unpacked

CPU = torch.device("cpu")
LIMIT_S = 300.0
"""For which a sender would wait for who does not read."""
TENSORS = {
    "embedding": torch.arange(50, dtype=torch.float32).view(10, 5),
    "norm": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "scale": torch.tensor(0.25, dtype=torch.float64),
    "large": torch.arange(400, dtype=torch.int64).view(4, 100),
    "tied": torch.arange(50, dtype=torch.float32).view(10, 5),
}


@dataclass(frozen=True)
class Weights:
    """Tensors that are at hand."""

    by_name: Mapping[str, torch.Tensor]

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.by_name.items()


def notice_of(sizes: Sequence[int], bucket_bytes: int) -> Notice:
    sent = [TensorSpec(str(number), "uint8", [size]) for number, size in enumerate(sizes)]
    return Notice("127.0.0.1", 1, 1, 1.0, "cpu", False, bucket_bytes, sent)


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(16, 512))
def test_every_tensor_is_in_one_bucket_and_only_one_that_is_larger_is_over_its_size(
    sizes: list[int], limit: int
) -> None:
    notice = notice_of(sizes, limit)
    buckets = notice.buckets()
    assert [sent for bucket in buckets for sent in bucket] == notice.tensors
    assert all(bucket and (len(bucket) == 1 or sum(sent.bytes for sent in bucket) <= limit) for bucket in buckets)
    for one, other in itertools.pairwise(buckets):
        assert sum(sent.bytes for sent in one) + other[0].bytes > limit, "there was room"


def test_a_bucket_that_changed_on_its_way_is_refused() -> None:
    bucket = [TensorSpec(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in TENSORS.items()]
    buffer = packed(list(TENSORS.values()), bucket, CPU, checked=True)
    assert_same(dict(unpacked(buffer, bucket, checked=True)))
    buffer[7] ^= 1
    with pytest.raises(ValueError, match="the weights that arrived have checksum"):
        dict(unpacked(buffer, bucket, checked=True))


@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_two_workers_receive_what_is_sent(bucket_bytes: int) -> None:
    broadcast = Broadcast(Weights(TENSORS), 2, "127.0.0.1", CPU, 30.0, checked=True, bucket_bytes=bucket_bytes)
    plain, found = broadcast.notice.plain(), [dict[str, torch.Tensor](), dict[str, torch.Tensor]()]

    def receive(worker: int) -> None:
        found[worker].update(receive_tensors(plain, worker, CPU))

    workers = [threading.Thread(target=receive, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    broadcast.run()
    for worker in workers:
        worker.join(300)
    for tensors in found:
        assert_same(tensors)


def assert_same(tensors: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_workers_that_do_not_come_are_waited_for_no_longer_than_the_limit() -> None:
    with pytest.raises(EngineError, match=r"0 of 2 workers came for weights in 0.1 s"):
        Broadcast(Weights(TENSORS), 2, "127.0.0.1", CPU, 0.1).run()
    cancelled = Broadcast(Weights(TENSORS), 2, "127.0.0.1", CPU, 60.0)
    cancelled.cancel()
    cancelled.run()


def test_a_worker_that_dies_in_the_middle_does_not_hold_the_sender() -> None:
    # More than the sockets have room for, so that the sender has to wait for who does not read.
    large = {str(number): torch.zeros(1 << 22) for number in range(8)}
    broadcast = Broadcast(Weights(large), 1, "127.0.0.1", CPU, LIMIT_S, bucket_bytes=1 << 24)
    worker = multiprocessing.get_context("spawn").Process(target=die_after_one, args=(broadcast.notice.plain(),))
    worker.start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="weights did not reach all of 1 workers"):
        broadcast.run()
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL and time.monotonic() - start < LIMIT_S


def die_after_one(plain: dict[str, Any]) -> None:
    next(receive_tensors(plain, 0, CPU))
    os.kill(os.getpid(), signal.SIGKILL)

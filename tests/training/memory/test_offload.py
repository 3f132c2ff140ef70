"""Offloaded tensors leave memory and return bit for bit for all their references."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from braidrl.errors import UserError
from braidrl.training.backends import BackendSpec
from braidrl.training.memory import offload
from braidrl.training.memory.offload import OffloadableTensors, storages
from braidrl.training.roles.worker import RoleWorker
from tests.training.parallel.laid_out import config_of, make_rows, one_step

MIB = 1 << 20
SEEN = 16 * MIB
"""Half of the moved bytes: meanwhile other tests' threads free memory."""


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_offload_frees_memory_and_onload_restores_every_view() -> None:
    whole = torch.randn(32 * MIB // 4)
    view, copy = whole[8:24].view(4, 4), whole.clone()
    movable = OffloadableTensors(lambda: [whole, view])
    before = resident()
    movable.offload()
    assert movable.away_bytes == 32 * MIB, "two tensors share one storage"
    away = resident()
    assert away < before - SEEN
    movable.onload()
    assert movable.away_bytes == 0 and resident() > away + SEEN
    assert torch.equal(whole, copy) and torch.equal(view.flatten(), copy[8:24])
    view.zero_()
    assert not whole[8:24].any(), "it is still a view"


def test_moves_that_were_broken_off_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(1000) for _ in range(3)]
    copies = [tensor.clone() for tensor in tensors]
    movable, calls = OffloadableTensors(lambda: tensors), [0]

    def interrupted(call):  # type: ignore[no-untyped-def]
        def once(*arguments, **named):  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] == 2:
                raise KeyboardInterrupt
            return call(*arguments, **named)

        return once

    transfer = offload.transfer
    monkeypatch.setattr(offload, "transfer", interrupted(transfer))
    with pytest.raises(KeyboardInterrupt):
        movable.offload()
    assert movable.away_bytes == 4000
    movable.offload()
    assert movable.away_bytes == 12000 and not any(tensor.any() for tensor in tensors)
    calls[0] = 0
    monkeypatch.setattr(offload, "transfer", interrupted(transfer))
    with pytest.raises(KeyboardInterrupt):
        movable.onload()
    movable.onload()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_full_disk_raises_one_line_error_and_loses_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    copy, movable = tensor.clone(), OffloadableTensors(lambda: [tensor])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match=r"no room .*4,000 bytes of weights"):
            movable.offload()
    assert torch.equal(tensor, copy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_worker_trains_identically_to_one_that_never_moved(tiny_models: dict[str, Path], dtype: str) -> None:
    config = config_of(str(tiny_models["qwen2"]), dtype=dtype)
    everything = torch.arange(len(make_rows()))
    moved, stayed = (RoleWorker(BackendSpec("actor", config, train=True)) for _ in range(2))
    for iteration in (1, 2, 3):
        expected, values = one_step(stayed, everything, iteration), one_step(moved, everything, iteration)
        assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())
        for movable in moved.offloadable.values():
            movable.offload()
        assert moved.optimizer is not None
        # Weights of at least float32 are their own masters; AdamW has two moments for each, and a count.
        away = sum(s.nbytes() for s in storages([*stayed.model.parameters(), *stayed.optimizer.tensors()]))
        assert sum(movable.away_bytes for movable in moved.offloadable.values()) == away
        for movable in reversed(moved.offloadable.values()):
            movable.onload()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_goes_to_pinned_host_memory_and_back() -> None:
    tensor = torch.randn(8 * MIB, device="cuda")
    copy, movable = tensor.cpu(), OffloadableTensors(lambda: [tensor])
    before = torch.cuda.memory_allocated()
    movable.offload()
    assert torch.cuda.memory_allocated() == before - 32 * MIB
    other = torch.ones(8 * MIB, device="cuda")
    movable.onload()
    assert torch.equal(tensor.cpu(), copy) and bool(other.all())

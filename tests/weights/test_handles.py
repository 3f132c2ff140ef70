"""Handles give another process the trainer's tensors as they are, for as long as they are the version's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgpack
import pytest
import torch

from braidrl.engines.engine import EngineError
from braidrl.weights.handles import LiveWeights, MappedWeights

OPEN = Path("/proc/self/fd")


def open_files() -> set[str]:
    return {
        name
        for number in os.listdir(OPEN)
        if (OPEN / number).exists() and "torch" in (name := os.readlink(OPEN / number))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mapped_tensors_are_those_that_were_shared(dtype: torch.dtype) -> None:
    tied = torch.randn(6, 4).to(dtype).requires_grad_()
    tensors = {"embed": tied, "head": tied, "across": torch.randn(3, 5).to(dtype).t(), "one": torch.ones(1).to(dtype)}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    before = open_files()
    with LiveWeights(tensors).handles() as handles:
        plain = msgpack.unpackb(msgpack.packb(handles))
        weights = MappedWeights(plain)
        found = dict(weights.tensors())
        assert weights.shapes() == {name: tensor.shape for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == dtype
        assert len(json.dumps(plain)) < 200 * len(tensors), "handles, not numbers, travel"
    del found
    weights.finish()
    assert open_files() <= before, "what was shared is gone"
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places, "the trainer's storages stay"


def test_weights_that_have_changed_since_are_not_passed_off_as_the_version() -> None:
    current = True
    weights = LiveWeights({"w": torch.ones(2)}, lambda: current)
    with weights.handles() as handles:
        assert len(handles) == 1
    current = False
    with pytest.raises(EngineError, match="changed since that version"), weights.handles():
        pass

"""Weights on their way to an engine: every tensor, tied ones too, in buckets of shared memory, loaded whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from braidrl.runtimes.streaming.weights import WeightReceiver, WrongWeights, export
from braidrl.transfer.queue.owner import Owner
from braidrl.transfer.queue.storage import DataPlane, Evicted, Segments
from tests.tiny import MODELS


@pytest.fixture
def data() -> Iterator[DataPlane]:
    owner = Owner()
    yield DataPlane(Segments(owner.run, "trainer"), "tcp://127.0.0.1:1")
    owner.close()


def model(name: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(deepcopy(MODELS[name]), dtype=dtype)


def logits(of: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return of(torch.arange(6)[None]).logits


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
def test_an_engine_gets_every_tensor_whatever_the_size_of_buckets(
    data: DataPlane, name: str, bucket_bytes: int
) -> None:
    trainer, engine = model(name, 1), model(name, 2)
    blocks = export(trainer.state_dict(), data, bucket_bytes)
    names = list(trainer.state_dict())
    assert len(blocks) == (len(names) if bucket_bytes == 1 else 1 if bucket_bytes > 1 << 20 else len(blocks))
    assert not torch.equal(logits(engine), logits(trainer))
    WeightReceiver(data).load(engine, 3, blocks)
    assert torch.equal(logits(engine), logits(trainer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_travels(data: DataPlane, dtype: torch.dtype) -> None:
    trainer, engine = model("qwen2", 1, dtype), model("qwen2", 2, dtype)
    WeightReceiver(data).load(engine, 1, export(trainer.state_dict(), data))
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(engine.state_dict()[name], tensor)


def test_what_was_received_before_is_not_needed_any_more_and_changes_nothing_until_it_is_loaded(
    data: DataPlane,
) -> None:
    trainer, engine = model("qwen2", 1), model("qwen2", 2)
    blocks, source = export(trainer.state_dict(), data, 10_000), WeightReceiver(data)
    source.begin(1, blocks)
    before = logits(engine)
    while source.receive():
        assert torch.equal(logits(engine), before)
    data.free(blocks)
    source.load(engine, 1, blocks)
    assert torch.equal(logits(engine), logits(trainer))


def test_a_version_that_is_gone_amid_receiving_is_left_for_the_next(data: DataPlane) -> None:
    trainer, engine = model("qwen2", 1), model("qwen2", 2)
    old, source = export(trainer.state_dict(), data, 10_000), WeightReceiver(data)
    source.begin(1, old)
    assert source.receive()
    data.free(old)
    with pytest.raises(Evicted):
        source.receive()
    source.forget()
    source.load(engine, 2, export(trainer.state_dict(), data))
    assert torch.equal(logits(engine), logits(trainer))


def test_another_models_weights_are_refused_and_nothing_is_changed(data: DataPlane) -> None:
    engine = model("qwen2", 2)
    before = logits(engine)
    with pytest.raises(WrongWeights, match="differ in"):
        WeightReceiver(data).load(engine, 1, export(model("qwen3", 1).state_dict(), data))
    assert torch.equal(logits(engine), before)

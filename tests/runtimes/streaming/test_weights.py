"""Weights on their way to an engine: each rank's boxes, in buckets of shared memory, into whole tensors, slices, or host memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from braidrl.engines.embedded.sharded_decoding import Slices
from braidrl.queue.owner import Owner
from braidrl.queue.storage import DataPlane, Evicted, Segments
from braidrl.queue.table import Block
from braidrl.runtimes.streaming.weights import WeightExport, WeightReceiver, WrongWeights, own_boxes
from braidrl.weights.boxes import Box
from braidrl.weights.weight_index import WeightPart, described, read_index, weight_parts
from tests.tiny import MODELS


@pytest.fixture
def data() -> Iterator[DataPlane]:
    owner = Owner()
    yield DataPlane(Segments(owner.run, "trainer"), "tcp://127.0.0.1:1")
    owner.close()


def model(name: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(deepcopy(MODELS[name]), dtype=dtype).requires_grad_(False)


def logits(of: PreTrainedModel) -> Tensor:
    return of(torch.arange(6)[None]).logits


def exported(trainer: PreTrainedModel, data: DataPlane, bucket_bytes: int = 1 << 20) -> list[Block]:
    return from_ranks([weight_parts(trainer)], data, bucket_bytes)


def from_ranks(ranks: Sequence[Mapping[str, WeightPart]], data: DataPlane, bucket_bytes: int = 1 << 20) -> list[Block]:
    """What ranks write together that have these parts."""
    known = read_index([json.dumps(["", described(parts)]).encode() for parts in ranks])
    plans = [own_boxes(known, rank, len(ranks)) for rank in range(len(ranks))]
    exports = [WeightExport(lambda p=p: p, boxes, data, bucket_bytes) for p, boxes in zip(ranks, plans, strict=True)]
    return [block for one in exports for block in one.write()]


def receiver(engine: PreTrainedModel, data: DataPlane, stages: bool = False) -> WeightReceiver:
    return WeightReceiver(data, partial(weight_parts, engine), stages)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
def test_an_engine_gets_every_tensor_whatever_the_size_of_buckets(
    data: DataPlane, name: str, bucket_bytes: int
) -> None:
    trainer, engine = model(name, 1), model(name, 2)
    blocks = exported(trainer, data, bucket_bytes)
    tensors = len(weight_parts(trainer))
    assert len(blocks) == (tensors if bucket_bytes == 1 else 1 if bucket_bytes > 1 << 20 else len(blocks))
    assert not torch.equal(logits(engine), logits(trainer))
    receiver(engine, data).load(3, blocks)
    assert torch.equal(logits(engine), logits(trainer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_travels(data: DataPlane, dtype: torch.dtype) -> None:
    trainer, engine = model("qwen2", 1, dtype), model("qwen2", 2, dtype)
    receiver(engine, data).load(1, exported(trainer, data))
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(engine.state_dict()[name], tensor)


def upper(part: WeightPart) -> Box:
    rows = part.shape[0] // 2
    return Box.whole(part.shape).along(0, 0, rows)


def half(of: PreTrainedModel, own: bool) -> Mapping[str, WeightPart]:
    """The upper half of each tensor, or the lower one."""
    found = {}
    for name, part in weight_parts(of).items():
        box = upper(part)
        (box,) = [box] if own else Box.whole(part.shape).without(box)
        slices = Slices({name: part.shape}, {name: box})
        found[name] = replace(part, tensor=box.of(part.local), slices=slices)
    return found


def test_slices_come_from_whichever_boxes_have_them_and_no_more_of_them(data: DataPlane) -> None:
    """Two that have half of each tensor write; one takes all, one the lower halves."""
    trainer, engine, lower = model("qwen3", 1), model("qwen3", 2), model("qwen3", 3)
    blocks = from_ranks([half(trainer, True), half(trainer, False)], data)
    assert sum(block.size for block in blocks) < 1.2 * sum(t.nbytes for t in trainer.state_dict().values())
    receiver(engine, data).load(1, blocks)
    assert torch.equal(logits(engine), logits(trainer))
    before = deepcopy(lower)
    WeightReceiver(data, lambda: half(lower, False)).load(1, blocks)
    for name, part in weight_parts(lower).items():
        kept = upper(part)
        assert torch.equal(kept.of(part.local), kept.of(weight_parts(before)[name].local))
        (new,) = Box.whole(part.shape).without(kept)
        assert torch.equal(new.of(part.local), new.of(weight_parts(trainer)[name].local))


def test_ranks_that_have_the_same_write_equal_shares_of_it(data: DataPlane) -> None:
    trainer, engine = model("qwen2", 1), model("qwen2", 2)
    blocks = from_ranks([weight_parts(trainer)] * 2, data)
    assert [block.size for block in blocks] == pytest.approx([sum(block.size for block in blocks) / 2] * 2, rel=0.05)
    receiver(engine, data).load(1, blocks)
    assert torch.equal(logits(engine), logits(trainer))


def test_a_role_that_follows_keeps_its_share_of_what_it_had(data: DataPlane) -> None:
    trainer, follower = model("qwen2", 1), model("qwen2", 2)
    expected = {
        name: 0.75 * own.local + 0.25 * weight_parts(trainer)[name].local
        for name, own in weight_parts(follower).items()
    }
    keeping = {name: replace(part, kept=0.75) for name, part in weight_parts(follower).items()}
    WeightReceiver(data, lambda: keeping).load(1, exported(trainer, data))
    for name, part in weight_parts(follower).items():
        torch.testing.assert_close(part.local, expected[name])


def test_what_is_kept_in_host_memory_changes_nothing_until_it_is_loaded(data: DataPlane) -> None:
    trainer, engine = model("qwen2", 1), model("qwen2", 2)
    blocks, taking = exported(trainer, data, 10_000), receiver(engine, data, stages=True)
    taking.begin(1, blocks)
    before = logits(engine)
    while taking.receive():
        assert torch.equal(logits(engine), before)
    data.free(blocks)
    taking.load(1, blocks)
    assert torch.equal(logits(engine), logits(trainer))


def test_a_version_that_is_gone_amid_receiving_is_left_for_the_next(data: DataPlane) -> None:
    trainer, engine = model("qwen2", 1), model("qwen2", 2)
    old, taking = exported(trainer, data, 10_000), receiver(engine, data)
    taking.begin(1, old)
    assert taking.receive()
    data.free(old)
    with pytest.raises(Evicted):
        taking.receive()
    taking.forget()
    taking.load(2, exported(trainer, data))
    assert torch.equal(logits(engine), logits(trainer))


def test_another_models_weights_are_refused(data: DataPlane) -> None:
    with pytest.raises(WrongWeights, match=r"version 1 has .*, and the model has not"):
        receiver(model("qwen2", 2), data).load(1, exported(model("qwen3", 1), data))


def test_a_version_that_lacks_a_box_is_refused(data: DataPlane) -> None:
    with pytest.raises(WrongWeights, match="version 1 lacks"):
        receiver(model("qwen2", 2), data).load(1, exported(model("qwen2", 1), data, 10_000)[:-1])

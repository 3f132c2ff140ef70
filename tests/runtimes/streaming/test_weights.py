"""Versions on their way to an engine under streaming: files and offers of the ranks, into whole models, slices and
other roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from braidrl.cluster.shared_memory import shared_folder
from braidrl.cluster.world import Ranks, World
from braidrl.config import parse_config
from braidrl.data.messages import pack_message, unpack_message
from braidrl.engines.deployment import Deployment
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.queue.owner import StorageNode, remove_run
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.streaming.weights import (
    VersionWriter,
    WeightLocation,
    free,
    remove_weights,
    source_of,
)
from braidrl.weights.boxes import Box
from braidrl.weights.collective import Incoming, OfferedWeights
from braidrl.weights.file import WeightFile, WeightWriter
from braidrl.weights.in_place import EngineWeights
from braidrl.weights.reshard_plan import ShardIndex, describe, plan_moves, shared_blocks
from braidrl.weights.shards import WeightPart, weight_parts
from tests.tiny import MODELS, TOKENIZER


@pytest.fixture
def owner() -> Iterator[StorageNode]:
    made = StorageNode("here", "127.0.0.1")
    yield made
    made.close()


def model(name: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(deepcopy(MODELS[name]), dtype=dtype).requires_grad_(False)


def logits(of: PreTrainedModel) -> Tensor:
    return of(torch.arange(6)[None]).logits


def deployment(**rollout: object) -> Deployment:
    config = parse_config(
        {
            "flow": "grpo",
            "model": "none",
            "data": {"train": "none"},
            "device": "cpu",
            "rollout": rollout,
            "runtime": "streaming",
        }
    )
    return deploy(config, build_flow(config))


def writer(trainer: PreTrainedModel, owner: StorageNode, **rollout: object) -> VersionWriter:
    return VersionWriter("actor", lambda: weight_parts(trainer), World(), deployment(**rollout), owner.run)


def load(engine: PreTrainedModel, place: WeightLocation) -> None:
    # As a message, which is what passes through the control plane.
    EngineWeights(engine).refresh(source_of(unpack_message(pack_message(place), WeightLocation)))


@pytest.mark.parametrize("way", ["file", "collective"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_engine_holds_exactly_one_version_of_every_tensor(owner: StorageNode, name: str, way: str) -> None:
    trainer, engine = model(name, 1), model(name, 2)
    versions = writer(trainer, owner, weights=way)
    expected, place = logits(trainer), versions.begin()()
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(1)
    load(engine, place)
    assert torch.equal(logits(engine), expected)
    assert place.bytes == sum(part.local.nbytes for part in weight_parts(trainer).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_travels(owner: StorageNode, dtype: torch.dtype) -> None:
    trainer, engine = model("qwen2", 1, dtype), model("qwen2", 2, dtype)
    load(engine, writer(trainer, owner).begin()())
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(engine.state_dict()[name], tensor)


def upper(part: WeightPart) -> Box:
    return Box.whole(part.shape).along(0, 0, part.shape[0] // 2)


def half(of: PreTrainedModel, own: bool) -> Mapping[str, WeightPart]:
    """The upper half of each tensor, or the lower one."""
    result = {}
    for name, part in weight_parts(of).items():
        box = upper(part)
        box = box if own else box.along(0, box.sizes[0], part.shape[0])
        result[name] = replace(part, tensor=box.of(part.local), sliced=(part.shape, box))
    return result


def test_sharded_ranks_write_one_file_and_readers_get_slices(owner: StorageNode, tmp_path: Path) -> None:
    trainer, lower = model("qwen3", 1), model("qwen3", 3)
    halves = [half(trainer, True), half(trainer, False)]
    parts_of = [[(p.names, p.shape, "float32", p.box) for p in parts.values()] for parts in halves]
    known = ShardIndex([describe(parts) for parts in parts_of], ["", ""])
    groups = [replace(group, wanted=shared_blocks(group, [0, 1])) for group in known.groups()]
    for rank in range(2):
        plan = plan_moves(groups, rank, 2, known.machines)
        written = sum(box.elements for boxes in plan.stays.values() for box in boxes)
        assert plan.sends.total == plan.receives.total == 0
        assert written == sum(part.local.numel() for part in halves[rank].values())
    before, place = deepcopy(lower), writer(trainer, owner, weights="collective").begin()()
    source = source_of(place)
    assert isinstance(source, OfferedWeights)
    with source.request(1) as notice:
        moved = Incoming(notice, 0, torch.device("cpu")).put_into(half(lower, False))
    for name, part in weight_parts(lower).items():
        kept = upper(part)
        assert torch.equal(kept.of(part.local), kept.of(weight_parts(before)[name].local))
        new = kept.along(0, kept.sizes[0], part.shape[0])
        assert torch.equal(new.of(part.local), new.of(weight_parts(trainer)[name].local))
    assert moved.received == sum(part.local.nbytes for part in half(lower, False).values())


@pytest.mark.parametrize("way", ["file", "collective"])
def test_a_role_that_copies_another_keeps_its_share(owner: StorageNode, way: str) -> None:
    trainer, copy = model("qwen2", 1), model("qwen2", 2)
    expected = {
        name: 0.75 * own.local + 0.25 * weight_parts(trainer)[name].local for name, own in weight_parts(copy).items()
    }
    keeping = {name: replace(part, decay=0.75) for name, part in weight_parts(copy).items()}
    source = source_of(writer(trainer, owner, weights=way).begin()())
    source.put_into(keeping)
    for name, part in weight_parts(copy).items():
        torch.testing.assert_close(part.local, expected[name])


def test_another_models_weights_are_refused_before_anything_changes(owner: StorageNode) -> None:
    other = model("qwen2", 2)
    before = logits(other)
    for way in ("file", "collective"):
        place = writer(model("qwen3", 1), owner, weights=way).begin()()
        with pytest.raises(ValueError, match="not those of this model"):
            load(other, place)
        with pytest.raises(ValueError, match="not those of this model"):
            source_of(place).put_into(weight_parts(other))
    assert torch.equal(logits(other), before)


def test_version_file_exists_until_freed_or_run_ends(owner: StorageNode) -> None:
    versions = writer(model("qwen2", 1), owner)
    first, second, third = (versions.begin()() for _ in range(3))
    assert all(Path(place.path).parent == shared_folder() for place in (first, second, third))
    free([first])
    assert not Path(first.path).exists() and Path(second.path).exists()
    versions.forget([first.number, second.number])
    assert not Path(second.path).exists()
    remove_run(owner.run, owner.storage)
    assert not Path(third.path).exists()


def test_servers_read_a_folder_with_every_name(owner: StorageNode, tmp_path: Path) -> None:
    trainer = model("qwen2", 1)
    servers = {"urls": "http://127.0.0.1:9", "folder": str(tmp_path)}
    versions = writer(trainer, owner, engine="http", servers=servers)
    place = versions.begin()()
    assert Path(place.path).name == "model.safetensors" and not place.machines
    with closing(WeightFile(place.path)) as file:
        assert file.shapes().keys() == trainer.state_dict().keys()
    remove_weights(owner.run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weight_file_needs_no_second_host_copy(owner: StorageNode) -> None:
    trainer = model("qwen2", 1)
    parts = weight_parts(trainer)
    file_writer = WeightWriter(parts, Ranks())
    with closing(file_writer.write(parts)) as file:
        size = sum(part.local.nbytes for part in parts.values())
        assert (file_writer.transfer.traffic.stayed, file_writer.transfer.traffic.sent) == (size, 0)
        # The engine reads the file's own pages.
        pointers = {part.local.untyped_storage().data_ptr() for part in file.parts().values()}
        assert len(pointers) <= len(parts) and not pointers & {
            p.local.untyped_storage().data_ptr() for p in parts.values()
        }


def test_a_mapped_file_is_the_engines_weights() -> None:
    """The engine's tensors are the file's pages, joined ones too; they outlive the file, and writes to them do not
    change it.
    """
    trainer, own = model("llama", 1), model("llama", 2)
    engine = EmbeddedEngine(own, TOKENIZER, Decoding(slots=2, max_sequence_tokens=32))
    parts = weight_parts(trainer)
    writer = WeightWriter(parts, Ranks())
    with closing(writer.write(parts)) as file:
        engine.publish(1, file)
        with open(file.path, "rb") as pages:
            before = pages.read()
        with torch.no_grad():
            own.model.norm.weight.add_(1)
        with open(file.path, "rb") as pages:
            assert pages.read() == before
        engine.publish(2, file)
    where = {parameter.untyped_storage().data_ptr() for parameter in own.parameters()}
    assert len(where) == 1
    for name, tensor in trainer.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, rtol=0, atol=0)
    with closing(writer.write(parts)) as file:
        engine.publish(3, file)
    assert {parameter.untyped_storage().data_ptr() for parameter in own.parameters()}.isdisjoint(where)

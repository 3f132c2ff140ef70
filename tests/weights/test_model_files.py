"""Tensors go to engines by the hub's names, and come back from files by the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from braidrl.training.decoders.proof import quietly
from braidrl.training.decoders.shrink import shrink_config, tiny_model
from braidrl.weights.model_files import HubNames, ModelFiles, by_numbers


@pytest.mark.parametrize(("name", "differ"), [("qwen3_moe", True), ("kimi_linear", True), ("gpt_oss", False)])
def test_streamed_names_are_those_that_transformers_saves_and_are_read_back(
    name: str, differ: bool, tmp_path: Path
) -> None:
    with quietly():
        model = tiny_model(shrink_config(AutoConfig.for_model(name)))
        model.save_pretrained(tmp_path / "transformers")
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = HubNames(model)
    streamed = dict(names.of(reversed(own.items())))
    saved = load_file(tmp_path / "transformers" / "model.safetensors")
    assert names.differ is differ and (streamed.keys() != own.keys()) is differ
    assert streamed.keys() == saved.keys() and all(torch.equal(streamed[n], saved[n]) for n in saved)
    (tmp_path / "ours").mkdir()
    save_file({n: tensor.contiguous() for n, tensor in streamed.items()}, tmp_path / "ours" / "model.safetensors")
    read = ModelFiles(tmp_path / "ours", model)
    assert all(torch.equal(read[n], tensor) for n, tensor in own.items())


def test_parts_of_a_tensor_are_joined_in_the_order_of_their_numbers() -> None:
    ordered = ["layers.9.shard_2.weight", "layers.9.shard_10.weight", "layers.10.shard_1.weight"]
    named = dict.fromkeys(ordered[::-1])
    assert sorted(named, key=by_numbers) == ordered

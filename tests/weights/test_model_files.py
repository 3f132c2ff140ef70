"""Tensors go to engines by the hub's names, and come back from files by the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from braidrl.training.decoders.proof import quietly
from braidrl.training.decoders.shrink import shrink_config, tiny_model
from braidrl.weights.model_files import HubNames, ModelFiles, auto_class, by_numbers
from tests.training.decoders.families import write_family


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


def test_longcat_flash_is_read_from_files_of_the_experts_that_have_weights(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_family(tmp_path, "longcat_flash"))
    model: Any = auto_class(config).from_pretrained(tmp_path)
    stored = {int(name.split(".")[5]) for name in load_file(tmp_path / "model.safetensors") if ".experts." in name}
    assert stored == set(range(config.n_routed_experts)) and config.zero_expert_num > 0
    experts, states = model.model.layers[0].mlp.experts, torch.randn(3, config.hidden_size)
    chosen = torch.tensor([[0, config.n_routed_experts]]).expand(3, 2)
    with torch.no_grad():
        both = experts(states, chosen, torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 0.5]]))
    torch.testing.assert_close(both[1], states[1] / 2, rtol=0, atol=0)
    torch.testing.assert_close(both[2] - experts(states, chosen, torch.tensor([[1.0, 0.0]] * 3))[2], states[2] / 2)

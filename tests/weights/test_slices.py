"""The parts that ranks have of a model's tensors make up the whole, as torch divides it and as the layers need it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from braidrl.engines.embedded.sharded_decoding import check_heads, load_for_decoding
from braidrl.errors import UserError
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.tensor import full_plan_of
from braidrl.weights.boxes import Box, boxes_of, chunk
from tests.tiny import SIZES, TOKENIZER

RANKS = 4
WIDE = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIGS = {
    "qwen3": Qwen3Config(**WIDE, head_dim=8, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
}


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_dimension_is_divided_as_torch_divides_it(length: int, ranks: int) -> None:
    numbers = torch.arange(length)
    parts = [numbers[at : at + size] for at, size in (chunk(length, rank, ranks) for rank in range(ranks))]
    assert torch.equal(torch.cat(parts), numbers)
    for part, expected in zip(parts, numbers.chunk(ranks) if length else (), strict=False):
        assert torch.equal(part, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        made[name] = tmp_path_factory.mktemp("wide") / name
        model.save_pretrained(made[name])
        TOKENIZER.save_pretrained(made[name])
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_four_ranks_load_their_slices_and_together_the_full_model(name: str, folders: dict[str, Path]) -> None:
    whole: Any = load_decoder(folders[name])
    tensors = whole.state_dict()
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    result = {key: torch.full_like(tensor, torch.nan) for key, tensor in tensors.items()}
    boxes = [boxes_of(shapes, full_plan_of(whole, "here", "less"), rank, RANKS) for rank in range(RANKS)]
    for rank in range(RANKS):
        ranks: Any = SimpleNamespace(rank=rank, size=RANKS)
        model, slices = load_for_decoding(folders[name], torch.float32, "cpu", ranks)
        assert slices.boxes == boxes[rank] and slices.shapes == shapes
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, boxes[rank][key].of(tensors[key])), key
            assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, "no more is held"
            boxes[rank][key].of(result[key]).copy_(tensor)
        if name == "qwen3":
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(torch.equal(result[key], tensor) for key, tensor in tensors.items())
    once = {key: shape for key, shape in shapes.items() if boxes[0][key] == boxes[1][key]}
    assert all("norm" in key or key.endswith(("o_proj.bias", "down_proj.bias")) for key in once)
    held = [sum(torch.Size(box.sizes).numel() for box in own.values()) for own in boxes]
    assert sum(held) == sum(s.numel() for s in shapes.values()) + (RANKS - 1) * sum(s.numel() for s in once.values())


def test_heads_stay_together(folders: dict[str, Path]) -> None:
    whole: Any = load_decoder(folders["qwen3"])
    shapes = {key: tensor.shape for key, tensor in whole.state_dict().items()}
    boxes = boxes_of(shapes, full_plan_of(whole, "here", "less"), 1, RANKS)
    layer = "model.layers.0.self_attn."
    # the second of four ranks has query heads 2 and 3, and the key head that they share
    assert boxes[f"{layer}q_proj.weight"] == Box((2 * 8, 0), (2 * 8, 32))
    assert boxes[f"{layer}k_proj.weight"] == Box((8, 0), (8, 32))
    assert boxes[f"{layer}o_proj.weight"] == Box((0, 2 * 8), (32, 2 * 8))


def test_weights_under_other_names_are_divided_too(folders: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folders["qwen3"]).base_model.save_pretrained(tmp_path)
    ranks: Any = SimpleNamespace(rank=3, size=RANKS)
    expected, _ = load_for_decoding(folders["qwen3"], torch.float32, "cpu", ranks)
    result, _ = load_for_decoding(tmp_path, torch.float32, "cpu", ranks)
    for (name, one), (other_name, other) in zip(
        expected.state_dict().items(), result.state_dict().items(), strict=True
    ):
        assert name == other_name and torch.equal(one, other)


def test_heads_that_do_not_divide_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"rollout.tensor=4 .*2 key/value heads; write"):
        check_heads({"num_attention_heads": 4, "num_key_value_heads": 2}, 4)

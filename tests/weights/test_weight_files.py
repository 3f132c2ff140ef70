"""A model that is read part by part is the one that is read whole, and nothing is read that a rank does not keep."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from braidrl.errors import UserError
from braidrl.training.loading import load_decoder, load_scorer
from braidrl.training.parallel.pipeline import split_layers
from braidrl.weights.checkpoint_files import ParameterReader, WeightFiles, shapes_in
from braidrl.weights.shards import shapes_of


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("load", [load_decoder, load_scorer])
def test_a_filled_model_is_the_one_that_is_loaded_whole(
    load: Any, name: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    whole, filled = load(tiny_models[name], torch.bfloat16), load(tiny_models[name], torch.bfloat16, on_meta=True)
    assert next(filled.parameters()).is_meta and not next(whole.parameters()).is_meta
    ParameterReader(tiny_models[name], filled)(filled)
    expected, tensors = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (whole, filled))
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor) and tensors[key].dtype == tensor.dtype, key
    assert [type(module) for module in filled.modules()] == [type(module) for module in whole.modules()]
    whole.save_pretrained(tmp_path / "whole")
    filled.save_pretrained(tmp_path / "filled")
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "filled" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_stage_reads_its_own_weights_once_and_no_others(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = WeightFiles.__getitem__

    def noted(files: WeightFiles, name: str) -> Tensor:
        read.append(name)
        return get(files, name)

    monkeypatch.setattr(WeightFiles, "__getitem__", noted)
    stages = []
    for number in (0, 1):
        model: Any = load_decoder(tiny_models["qwen2"], on_meta=True)
        fill = ParameterReader(tiny_models["qwen2"], model)
        split_layers(model, number, 2)
        for layer in model.base_model.layers:
            fill(layer)
        kept = weakref.ref(model.base_model.layers[number].mlp.up_proj.weight)
        fill(model)
        assert sorted(read) == sorted(shapes_of(model))
        stages.append(read.copy())
        read.clear()
        model.base_model.layers[number].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(1))
        assert kept() is None, "what was divided is still there whole"
    assert set(stages[0]) & set(stages[1]) == {"model.embed_tokens.weight"}


def test_weights_under_other_names_are_loaded_whole(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    source: Any = AutoModelForCausalLM.from_pretrained(tiny_models["qwen2"])
    source.base_model.save_pretrained(tmp_path)
    model = load_decoder(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), source.parameters(), strict=True))


def test_shapes_need_no_reading_and_damaged_files_raise_one_line_errors(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = load_decoder(tiny_models["llama"])
    assert shapes_in(WeightFiles(tiny_models["llama"])) == shapes_of(model)
    content = (tiny_models["llama"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors .*; copy it whole") as caught:
        WeightFiles(tmp_path)
    assert "\n" not in str(caught.value)

"""A decoder directory loads as it was saved; an incomplete one is refused in one line that names the missing part."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from braidrl.errors import UserError
from braidrl.training.loading import load_decoder, unused_weights
from braidrl.training.pretrained import load_tokenizer
from tests.training.compute.test_attention import CONFIGS


def save_model(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_config(deepcopy(config))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return model.state_dict()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_weights_load_as_saved_in_the_dtype_asked_for(name: str, tmp_path: Path) -> None:
    saved = save_model(tmp_path, CONFIGS[name])
    loaded = load_decoder(tmp_path, torch.float64)
    for parameter_name, value in loaded.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, saved[parameter_name].double())
    assert load_tokenizer(tmp_path).eos_token_id == 2


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "no-such-model"}
    (folder / "config.json").write_text(json.dumps(config))


def more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    wide = {"intermediate_size": config["intermediate_size"] + 8}
    (folder / "config.json").write_text(json.dumps(config | wide))


def fewer_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, "has no config.json"),
        (without_weights, "no weights"),
        (unknown_type, "has no model_type .no-such-model"),
        (more_layers, "the weights in .* lack model.layers.2"),
        (wider, r"mlp.down_proj.weight in the weights of .* by config.json"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"])
    damage(tmp_path)
    for read in (load_decoder, unused_weights):
        with pytest.raises(UserError, match=message) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_weights_that_a_model_does_not_use_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"])
    assert not unused_weights(tmp_path)
    fewer_layers(tmp_path)
    unused = unused_weights(tmp_path)
    assert len(unused) == 9 and all(name.startswith("model.layers.1.") for name in unused)


def test_a_missing_folder_and_a_missing_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        load_decoder(tmp_path / "nowhere")
    save_model(tmp_path, CONFIGS["llama"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_block_scaled_fp8_weights_are_decoded_when_read(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["qwen3"])
    folder = tmp_path
    saved: dict[str, torch.Tensor] = {}
    expected = load_file(folder / "model.safetensors")
    for name, values in expected.items():
        saved[name] = values
        if name.endswith("proj.weight"):
            scales = 0.5 + torch.rand(-(-len(values) // 16), -(-values.shape[1] // 16))
            every = scales.repeat_interleave(16, 0)[: len(values)].repeat_interleave(16, 1)[:, : values.shape[1]]
            saved[name], saved[f"{name}_scale_inv"] = (values / every).to(torch.float8_e4m3fn), scales
            expected[name] = saved[name].float() * every
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(settings))
    model = load_decoder(folder)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    assert "quantization_config" not in model.config.to_dict()
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="quantised by gptq"):
        load_decoder(folder)


def test_a_configurations_dropout_is_switched_off_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, CONFIGS["llama"])
    settings = json.loads((tmp_path / "config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for _ in range(2):
        assert load_decoder(tmp_path).config.attention_dropout == 0.0
    assert caplog.text.count("trains without attention_dropout") == 1

"""A decoder directory loads as it was saved; one that is incomplete is refused in one line that says what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from braidrl.errors import UserError
from braidrl.training.loading import load_decoder, load_tokenizer
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


def dropout(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, "has no config.json"),
        (without_weights, "no weights"),
        (unknown_type, "config.json cannot be read: .*no-such-model"),
        (more_layers, "the weights in .* lack model.layers.2"),
        (dropout, "sets attention_dropout to 0.1"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"])
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_decoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_missing_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        load_decoder(tmp_path / "nowhere")
    save_model(tmp_path, CONFIGS["llama"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path)

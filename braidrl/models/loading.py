"""From a Hugging Face directory to a decoder and its tokenizer; nothing is ever fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from braidrl.errors import UserError
from braidrl.models.attention import ATTENTION
from braidrl.models.linear import use_fast_products

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# What a model does beside softmax attention and a linear output layer, and the value that means "not at all".
UNSUPPORTED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "attention_dropout": 0.0,
}


def load_decoder(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The causal decoder in a Hugging Face directory, with Braid's attention.

    Raises UserError for a folder that is missing, incomplete or holds a model that cannot be trained here.
    """
    folder = _model_folder(path)
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise UserError(f"model: {folder} has a config.json but no weights (*.safetensors); copy the whole model")
    config = _config(folder)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=ATTENTION,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"model: {folder} cannot be loaded: {_first_line(error)}") from error
    if loaded["missing_keys"]:
        raise UserError(f"model: the weights in {folder} lack {_some(loaded['missing_keys'])}; copy the whole model")
    use_fast_products(model)
    return model.to(device)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a Hugging Face directory. Raises UserError when there is none."""
    folder = _model_folder(path)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(
            f"model: {folder} has no tokenizer (tokenizer.json); copy it there from where the model is from"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UserError(f"model: the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error


def _model_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"model: there is no folder {folder}; give the path of a Hugging Face model directory")
    if not (folder / "config.json").is_file():
        raise UserError(f"model: {folder} has no config.json; give the path of a Hugging Face model directory")
    return folder


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UserError(f"model: {folder}/config.json cannot be read: {_first_line(error)}") from error
    for name, nothing in UNSUPPORTED.items():
        value = getattr(config, name, nothing)
        if value is not None and value != nothing:
            raise UserError(
                f"model: {folder} sets {name} to {value}, which is not supported; use Qwen2, Qwen3 or Llama"
            )
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")

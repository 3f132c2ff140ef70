"""Loading a decoder and its tokenizer from a Hugging Face directory; nothing is ever downloaded."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from braidrl.errors import UserError, first_line
from braidrl.native.linear import use_fast_products
from braidrl.training.compute.attention import ATTENTION
from braidrl.weights.checkpoint_files import HEAD, WeightFiles

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
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", on_meta: bool = False
) -> PreTrainedModel:
    """Load the causal decoder of a Hugging Face directory, with Braid's attention.

    Args:
        path: The directory.
        dtype: Of the parameters.
        device: Where the parameters go.
        on_meta: Leave them on the meta device for `ParameterReader`, unless the files have them under other names.

    Raises:
        UserError: For a folder that is missing, incomplete or holds a model that cannot be trained here.
    """
    folder = _whole_model_folder(path)
    model, missing = _load(AutoModelForCausalLM, folder, _config(folder), dtype, on_meta)
    if missing:
        raise UserError(f"model: the weights in {folder} lack {_some(missing)}; copy the whole model")
    return model if is_on_meta(model) else model.to(device)


def load_scorer(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fresh_head: bool = True,
    on_meta: bool = False,
) -> PreTrainedModel:
    """Load a decoder with a scalar head, from a sequence-classification directory or a causal decoder's; see `load_decoder`.

    With `fresh_head` a missing head is made of zeros: every value and score begins as 0, whatever the seed. Without it a missing head
    raises UserError.
    """
    folder = _whole_model_folder(path)
    check_scorer(folder, fresh_head)
    config = _config(folder)
    config.num_labels = 1
    model, missing = _load(AutoModelForSequenceClassification, folder, config, dtype, on_meta)
    if lacking := set(missing) - {HEAD}:
        raise UserError(f"model: the weights in {folder} lack {_some(lacking)}; copy the whole model")
    if not hasattr(model, "score"):
        raise UserError(
            f"model: {type(model).__name__} in {folder} has no linear `score` head; use Qwen2, Qwen3 or Llama"
        )
    if missing:
        torch.nn.init.zeros_(model.score.weight)
    return model if is_on_meta(model) else model.to(device)


def has_score_head(path: str | Path) -> bool:
    """Return True for the folder of a model that scores texts and does not generate them; reads no weights."""
    file = Path(path).expanduser() / "config.json"
    names = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else ()
    return any(name.endswith("ForSequenceClassification") for name in names or ())


def check_scorer(path: str | Path, fresh_head: bool) -> None:
    """Raise UserError where a folder cannot give a model with a scalar head; reads no weights."""
    folder = _model_folder(path)
    config = _config(folder)
    if has_score_head(folder):
        if config.num_labels != 1:
            raise UserError(
                f"model: {folder} classifies into {config.num_labels} labels; a critic or reward model has one (num_labels: 1)"
            )
    elif not fresh_head:
        raise UserError(
            f"model: {folder} has no trained score head; train one by the recipe reward_model, and give its directory to the role"
        )


def check_model(path: str | Path) -> None:
    """Check what can be checked of a model before it is loaded: its architecture, and the headers of the weight files that are there.

    Args:
        path: A Hugging Face directory.

    Raises:
        UserError: It is no decoder that can be trained here, or a file of its weights is damaged or cut off.
    """
    folder = _model_folder(path)
    config = _config(folder)
    try:
        with torch.device("meta"):
            body = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).base_model
    except (ValueError, RuntimeError) as error:
        raise UserError(f"model: {folder} cannot be loaded: {first_line(error)}") from error
    if not all(hasattr(body, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        raise UserError(
            f"model: {folder} is a {type(body).__name__}, which is not supported; use Qwen2, Qwen3 or Llama"
        )
    WeightFiles(folder)


def _whole_model_folder(path: str | Path) -> Path:
    folder = _model_folder(path)
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise UserError(f"model: {folder} has a config.json but no weights (*.safetensors); copy the whole model")
    return folder


def is_on_meta(model: PreTrainedModel) -> bool:
    """Return True for a model whose parameters have not been read yet."""
    return next(model.parameters()).is_meta


def _load(auto: Any, folder: Path, config: Any, dtype: torch.dtype, on_meta: bool) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the names of the weights that the folder lacks."""
    if on_meta:
        model = _skeleton(auto, folder, config, dtype)
        missing = {name for name, _ in model.named_parameters()} - set(WeightFiles(folder))
        if missing <= {HEAD}:
            use_fast_products(model)
            return model, sorted(missing)
    # Transformers prints a table of missing weights; the caller says in one line which of them matter.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, loaded = auto.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=ATTENTION,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"model: {folder} cannot be loaded: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    use_fast_products(model)
    return model, sorted(loaded["missing_keys"])


def _skeleton(auto: Any, folder: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with parameters on the meta device, and with the buffers that its configuration alone decides."""
    with torch.device("meta"):
        model: Any = auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    body = model.base_model
    body.rotary_emb = type(body.rotary_emb)(config=model.config)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory. Raises UserError when there is none."""
    folder = _model_folder(path)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(
            f"model: {folder} has no tokenizer (tokenizer.json); copy it there from where the model is from"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UserError(f"model: the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error


def _model_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"model: there is no folder {folder}; give the path of a Hugging Face model directory")
    if not (folder / "config.json").is_file():
        raise UserError(f"model: {folder} has no config.json; give the path of a Hugging Face model directory")
    return folder


def read_model_config(path: str | Path) -> Any:
    """Read a model's config.json; no weights are needed. Raises UserError as `load_decoder`."""
    return _config(_model_folder(path))


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UserError(f"model: {folder}/config.json cannot be read: {first_line(error)}") from error
    for name, nothing in UNSUPPORTED.items():
        value = getattr(config, name, nothing)
        if value is not None and value != nothing:
            raise UserError(
                f"model: {folder} sets {name} to {value}, which is not supported; use Qwen2, Qwen3 or Llama"
            )
    return config


def _some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")

"""Configurations and tokenizers of Hugging Face directories. No model is loaded, nor the code of one."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from braidrl.config import Config
from braidrl.config.paths import model_folder
from braidrl.data.chat import check_template
from braidrl.errors import UserError, first_line, located, shown
from braidrl.training.model_settings import (
    TOKENIZER_BYTES,
    check_tokenizer,
    checked_settings,
    disable_dropout,
    has_score_head,
    read_object,
)
from braidrl.training.role_settings import settings_of

logger = logging.getLogger(__name__)


@cache
def warn_once(message: str, *values: object) -> None:
    """Log a warning about a model's folder, which this process may read many times."""
    logger.warning(message, *values)


def read_model_config(path: str | Path) -> Any:
    """Read a model's config.json, without weights. Raises UserError as `load_decoder`."""
    folder, settings = model_folder(path), checked_settings(path)
    try:
        config = deepcopy(_parsed_config(folder, (folder / "config.json").read_bytes()))
    except Exception as error:
        kind, where = settings.get("model_type"), f"model: {folder}/config.json"
        if kind is not None and kind not in CONFIG_MAPPING:
            beside = ", and Braid runs no code beside a model (auto_map)" if settings.get("auto_map") else ""
            raise UserError(
                f"{where}: transformers {transformers.__version__} has no model_type {shown(kind)}{beside}; install a "
                "version of transformers that has it"
            ) from error
        raise UserError(f"{where} cannot be read: {named_error(error)}") from error
    check_own_code(folder, settings, config)
    if random := disable_dropout(config):
        warn_once("model: %s trains without %s", folder, ", ".join(sorted(set(random))))
    return config


def config_of(model: str) -> Any:
    """Read the configuration of a directory, a file, or a hub id. Raises UserError."""
    path = Path(model).expanduser()
    if path.is_dir():
        return read_model_config(path)
    try:
        return transformers.AutoConfig.from_pretrained(path if path.is_file() else model, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UserError(f"braid check {model}: no folder, config.json or kept model: {first_line(error)}") from error


def check_own_code(folder: Path, settings: Mapping[str, Any], config: Any) -> None:
    """Warn that a model's custom code is not run; raise UserError if its class is not one of transformers'."""
    classes = settings.get("auto_map")
    if not classes:
        return
    classes = classes if isinstance(classes, dict) else {}
    auto_classes = [value for key, value in classes.items() if key.startswith("AutoModel")]
    named = [str(name).rpartition(".")[2] for name in (*(settings.get("architectures") or ()), *auto_classes)]
    strange = [name for name in named if not hasattr(transformers, name)]
    if strange:
        raise UserError(
            f"model: {folder}/config.json names a custom class, {strange[0]}, in auto_map, and Braid runs no code "
            f"beside a model; if it computes as {config.model_type} of transformers does, remove auto_map and name "
            "that class in architectures"
        )
    warn_once(
        "model: %s has custom code (auto_map), which is not run: it is computed as %s of transformers",
        folder,
        config.model_type,
    )


@lru_cache(maxsize=64)
def _parsed_config(folder: Path, text: bytes) -> Any:
    """Return the configuration of a folder whose config.json holds this text; cached for the many reads at start."""
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_tokenizer(path: str | Path) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory. Raises UserError if it is missing or invalid."""
    folder = model_folder(path)
    check_tokenizer(folder)
    read_model_config(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.get_vocab()
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"model_max_length is {shown(tokenizer.model_max_length)}, and no number")
        return tokenizer
    except BaseException as error:
        # A panic of the tokenizers library (Rust) is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        for path in sorted(folder.glob("*token*.json")):
            read_object(path, TOKENIZER_BYTES)
        raise UserError(f"model: the tokenizer in {folder} cannot be loaded: {named_error(error)}") from error


def separate_tokenizer(
    role: str, config: Config, tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.PreTrainedTokenizerBase | None:
    """Return the tokenizer of a role's model if its vocabulary differs from `tokenizer`, otherwise None."""
    path = settings_of(role, config).model
    if path == config.model:
        return None
    role_tokenizer = load_tokenizer(path)
    return role_tokenizer if role_tokenizer.get_vocab() != tokenizer.get_vocab() else None


def check_tokens(model: str | Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raise UserError if an end token of model or tokenizer is unknown, or its chat template is invalid."""
    folder = model_folder(model)
    config, path, settings = read_model_config(folder), folder / "generation_config.json", None
    if path.is_file():
        read_object(path)
        try:
            settings = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
        except Exception as error:
            raise UserError(f"model: {path} cannot be read: {named_error(error)}") from error
    with located(f"model: {folder}"):
        check_template(tokenizer)
    size = getattr(config, "vocab_size", None)
    if size is None:
        return
    named = {
        "config.json": config.eos_token_id,
        "generation_config.json": settings,
        "the tokenizer": tokenizer.eos_token_id,
    }
    for origin, ends in named.items():
        for end in ends if isinstance(ends, list | tuple) else [ends]:
            if end is not None and not (type(end) is int and 0 <= end < size):
                raise UserError(
                    f"model: {folder}: eos_token_id of {origin} is {shown(end)}, and the model has the tokens 0 to "
                    f"{size - 1}; responses could not end: write the right one"
                )


def check_scorer(path: str | Path, fresh_head: bool, key: str = "model") -> None:
    """Raise UserError, with `key`, if a folder cannot provide a model with a scalar head; reads no weights."""
    config = read_model_config(path)
    if has_score_head(path):
        if config.num_labels != 1:
            raise UserError(
                f"{key}: {path} classifies into {config.num_labels} labels; a critic or reward model has one "
                "(num_labels: 1)"
            )
    elif not fresh_head:
        raise UserError(
            f"{key}: {path} has no trained score head; train one by the recipe reward_model, and give its directory as "
            f"{key}; with algorithm.reward=verify the recipe ppo needs none"
        )


def model_settings(model: Path) -> Mapping[str, Any]:
    """Return the settings of a model's text part, including the names that transformers' models share; empty without a
    directory.
    """
    path = model.expanduser() / "config.json"
    if not path.is_file():
        return {}
    settings = read_object(path)
    settings |= settings.get("text_config") or {}
    kind = settings.get("model_type")
    families = transformers.CONFIG_MAPPING
    shared = families[kind].attribute_map if kind in families else {}
    return {**settings, **{name: settings[key] for name, key in shared.items() if key in settings}}


def named_error(error: BaseException) -> str:
    """Return a library's error in one line, with its type if the text alone is unclear."""
    text = shown(" ".join(str(error).split()))[1:-1]
    return text if isinstance(error, ValueError | OSError | RuntimeError) else f"{type(error).__name__}: {text}"

"""The JSON files of a model's folder, checked before transformers is loaded."""

import json
import re
from pathlib import Path
from typing import Any

from braidrl.config.paths import model_folder
from braidrl.errors import UserError, shown
from braidrl.parsing import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
CONFIG_BYTES, TOKENIZER_BYTES = 16 << 20, 512 << 20
SIZES = {
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 32,
}
"""Positive integers in a model's config.json, with their upper limits."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""Sizes that must not be null."""
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "rope_theta", "initializer_range")
RANDOM = re.compile(r"(dropout|pdrop|layerdrop|jitter)")
"""Names of settings that make the forward pass random."""


def checked_settings(model: str | Path) -> dict[str, Any]:
    """Return the object in a model's config.json. Raises UserError if it is missing, or for impossible sizes."""
    path = model_folder(model) / "config.json"
    settings = read_object(path)
    # Invalid or inconsistent sizes of the model or of its parts are refused before a model is built.
    for about in (
        settings,
        *(part for part in settings.values() if isinstance(part, dict) and {"hidden_size", "rope_theta"} & set(part)),
    ):
        for name, most in SIZES.items():
            value = about.get(name, 1)
            if value is None and name not in NEEDED:
                continue
            # Some types have a width for each layer.
            several = value if isinstance(value, list) and name not in NEEDED else [value]
            if not several or not all(type(number) is int and 1 <= number <= most for number in several):
                raise UserError(f"model: {path}: {name} is {shown(value)}; it must be a whole number from 1 to {most}")
        # A type may have its heads under another name, as Dbrx and GPT-2 do.
        heads, per_group = about.get("num_attention_heads"), about.get("num_key_value_heads")
        if heads and isinstance(per_group, int) and heads % per_group:
            raise UserError(
                f"model: {path}: num_key_value_heads {per_group} does not divide num_attention_heads {heads}"
            )
        for name in POSITIVE:
            value = about.get(name, 1.0)
            if value is None:  # a type that names another one
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
                raise UserError(f"model: {path}: {name} is {shown(value)}; it must be a number above 0")
        names = about.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"model: {path}: architectures is {shown(names)}; it must be a list of names")
        if heads and not about.get("head_dim") and about.get("hidden_size", heads) % heads:
            raise UserError(
                f"model: {path}: num_attention_heads {heads} does not divide hidden_size {about['hidden_size']}"
            )
    return settings


def check_tokenizer(model: str | Path) -> None:
    """Raise UserError for a model's folder without a tokenizer, or with one too large to read."""
    folder = model_folder(model)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(
            f"model: {folder} has no tokenizer (tokenizer.json); copy it there from where the model is from"
        )
    if any((folder / name).is_file() and (folder / name).stat().st_size > TOKENIZER_BYTES for name in TOKENIZER_FILES):
        raise UserError(f"model: the tokenizer in {folder} has more than {TOKENIZER_BYTES} bytes, which are not read")


def has_score_head(path: str | Path) -> bool:
    """Return True if a folder holds a model with a scalar head, without reading weights."""
    file = Path(path).expanduser() / "config.json"
    names = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else ()
    return any(name.endswith("ForSequenceClassification") for name in names or ())


def read_object(path: Path, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder. Raises UserError for other content."""
    settings = read_json(path, most_bytes, finite=False)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no object; copy the whole model")
    return settings


def disable_dropout(config: Any) -> list[str]:
    """Set all settings that make the forward pass random to 0, in place; return their names.

    A router's jitter stays: PhiMoE computes with it even in deterministic passes, and routers are never in training
    mode.
    """
    random_settings = []
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and name.endswith("config"):
            random_settings += disable_dropout(value)
        elif RANDOM.search(name) and isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            if "jitter" not in name:
                setattr(config, name, 0.0)
            random_settings.append(name)
    return random_settings

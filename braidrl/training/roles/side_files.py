"""The files of a Hugging Face directory besides its weights, built when a model is loaded, so that no checkpoint fails on one.

model, its folder ──transformers──▶ config.json, generation_config.json, tokenizer ──▶ bytes, kept ──▶ every checkpoint
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from braidrl.cluster.ranks import tell
from braidrl.errors import first_line

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
)  # fmt: skip


def save_weights(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's Hugging Face directory without its generation settings, which transformers may refuse to write."""
    if not model.can_generate():
        model.save_pretrained(folder, state_dict=weights)
        return
    generation = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = generation


def side_files(model: Any, path: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides its weights, by name.

    A file that transformers refuses to write is copied unchanged from the model's folder, with a warning.
    """
    generation: Any = model.generation_config if model.can_generate() else None
    with TemporaryDirectory(prefix="braid-side-files-") as name:
        folder = Path(name)
        save_weights(model, folder, {})
        for weights in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            weights.unlink()
        (folder / GENERATION).unlink(missing_ok=True)
        parts: dict[str, Callable[[], object]] = {
            "tokenizer": lambda: AutoTokenizer.from_pretrained(path, local_files_only=True).save_pretrained(folder)
        }
        if generation is not None:
            parts[GENERATION] = lambda: generation.save_pretrained(folder)
        for part, write in parts.items():
            try:
                write()
            except Exception as error:
                tell(
                    f"{path}: its {part} cannot be written as transformers would ({first_line(error)}); it is copied as it is"
                )
                for file in (GENERATION,) if part == GENERATION else TOKENIZER_FILES:
                    for found in path.glob(file):
                        shutil.copy(found, folder)
        return {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }

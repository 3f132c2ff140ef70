"""A model in a GGUF file, as llama.cpp has them: it becomes a Hugging Face directory, which everything else here reads.

FILE.gguf ──transformers──▶ dequantised weights, tokenizer, chat template ──▶ directory in the cache, once for each file
"""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from braidrl.errors import UserError
from braidrl.native.building import cache_folder

SUFFIX = ".gguf"


def from_gguf(file: Path, key: str) -> Path:
    """Return the directory in the cache that was made of a GGUF file, which is made where it is not there.

    Args:
        file: The file. Another size or time of change makes another directory.
        key: The configuration's, for messages.

    Raises:
        UserError: The file is not there or cannot be read, or the package that reads it is not installed.
    """
    if not file.is_file():
        raise UserError(
            f"{key}: there is no file {file}; give the path of a GGUF file or of a Hugging Face model directory"
        )
    state = file.stat()
    told_apart = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / "gguf" / f"{file.stem}-{told_apart}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as work:
        whole = Path(work) / "model"
        try:
            write_from_gguf(file, whole)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        move_whole(whole, folder)
    return folder


def move_whole(made: Path, folder: Path) -> None:
    """Give a model's finished directory its name, unless another process has written one there meanwhile.

    Args:
        made: The finished directory, on the same file system.
        folder: The name that it gets.

    Raises:
        OSError: It cannot be moved, and there is no model.
    """
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise


def write_from_gguf(file: Path, target: Path) -> None:
    """Write a Hugging Face directory from a GGUF file: weights in float32, tokenizer, chat template.

    Args:
        file: The GGUF file.
        target: The directory, which is made.

    Raises:
        UserError: The file cannot be read, or the package that reads it is not installed.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise UserError(
            "a GGUF file is read by the package gguf; install it with `pip install 'braidrl[gguf]'`"
        ) from error
    except (ValueError, KeyError, OSError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{file} cannot be read as a model ({said}); give one of a Llama, Qwen2 or Qwen3") from error
    config = quantised.config.to_dict()
    # A model that says it is quantised cannot be saved; its weights already are plain numbers.
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(quantised.config)(**config), dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

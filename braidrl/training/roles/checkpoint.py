"""Checkpoints of a role's worker: a plain Hugging Face directory with the optimizer's tensors beside it.

    actor/  config.json  model.safetensors  tokenizer.json        full tensors in every layout, adapters merged
            adapter/                                              adapters in peft's format, if only these are trained
            optimizer.safetensors                                 if each rank has the full model
            optimizer/  .metadata  __0_0.distcp  __1_0.distcp     else: each rank writes its own shards

Both forms of optimizer state can be read in any layout.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoTokenizer, GenerationConfig

from braidrl.cluster.ranks import tell
from braidrl.errors import UserError, first_line
from braidrl.training.optimizer import UNDIVIDED, MasterOptimizer
from braidrl.weights.checkpoint_files import TensorReader
from braidrl.weights.shards import as_dtensor, local_shard, shard_of

OPTIMIZER = "optimizer.safetensors"
PARTS = "optimizer"
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
    """Write a model's Hugging Face directory without its generation settings, which transformers may refuse to
    write.
    """
    generation = model.generation_config if model.can_generate() else None
    if generation is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if generation is not None:
            model.generation_config = generation


def side_files(model: Any, path: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides weights, by name; those that transformers refuses are
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
                    for found in path.glob(file):
                        shutil.copy(found, folder)
        return {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory; tied tensors stay tied."""
    found: dict[int, Tensor] = {}
    return {name: found.setdefault(id(t), t.detach().to("cpu", copy=True).contiguous()) for name, t in tensors.items()}


def optimizer_state(optimizer: MasterOptimizer, parameters: int, folder: Path) -> dict[str, Tensor]:
    """Return this rank's shards of a saved state of any layout.

    Raises UserError for damaged files, LookupError for another model's.
    """
    try:
        if (folder / OPTIMIZER).is_file():
            tensors = load_file(folder / OPTIMIZER)
            own = own_keys(optimizer, parameters, {key: tensor.shape for key, tensor in tensors.items()})
            return {key: shard_of(tensors[key], owner(optimizer, key, tensors[key])) for key in own}
        reader, wanted = TensorReader(folder / PARTS), dict[str, Tensor]()
        known = reader.read_metadata().state_dict_metadata
        saved = {key: about for key, about in known.items() if isinstance(about, TensorStorageMetadata)}
        if other := sorted(known.keys() - saved.keys()):
            raise LookupError(f"{other[0]} is no tensor")
        for key in own_keys(optimizer, parameters, {key: about.size for key, about in saved.items()}):
            dtype = saved[key].properties.dtype
            wanted[key] = torch.empty((), dtype=dtype)
            if saved[key].size:
                parameter = optimizer.by_number[int(key.split(".")[0])]
                wanted[key] = as_dtensor(torch.empty_like(local_shard(parameter), dtype=dtype), parameter)
        with warnings.catch_warnings():
            # Each rank reads its own shards on purpose: suppress the warning.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except (CheckpointException, SafetensorError, OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise UserError(
            f"the optimizer in {folder} is damaged or incomplete; resume from an older checkpoint, or copy it whole"
        ) from error
    return {key: local_shard(tensor) for key, tensor in wanted.items()}


def divided_state(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as DTensors, sharded like their parameters."""
    return {key: as_dtensor(tensor, owner(optimizer, key, tensor)) for key, tensor in optimizer.state().items()}


def owner(optimizer: MasterOptimizer, key: str, tensor: Tensor) -> Tensor:
    """Return the tensor whose sharding a state tensor has: its parameter, or itself if it is a scalar or never
    sharded.
    """
    number, _, name = key.partition(".")
    return optimizer.by_number[int(number)] if tensor.dim() and name not in UNDIVIDED else tensor


def own_keys(optimizer: MasterOptimizer, parameters: int, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return the keys of saved state whose parameters this rank holds.

    Raises LookupError if their names or shapes do not match.
    """
    found, names = list[str](), {number: set[str]() for number in optimizer.by_number}
    for key, shape in shapes.items():
        number, _, name = key.partition(".")
        if number.isdecimal() and int(number) not in optimizer.by_number:
            if int(number) >= parameters:
                raise LookupError(f"{key} is of another model: this one has {parameters} parameters")
            continue
        found.append(key)
        if name and name not in UNDIVIDED:
            names[int(number)].add(name)
            wanted = optimizer.by_number[int(number)].shape
            if shape and shape != wanted:
                raise LookupError(f"{key} is {tuple(shape)}, and not {tuple(wanted)}")
    for alike in optimizer.groups():
        if len({frozenset(names[number]) for number in alike}) > 1:
            raise LookupError(f"parameters of one group have different state: {names}")
    return found

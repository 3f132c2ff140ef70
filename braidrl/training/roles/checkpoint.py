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
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoTokenizer, GenerationConfig

from braidrl.cluster.process_groups import background_group
from braidrl.cluster.ranks import tell
from braidrl.errors import UserError, first_line
from braidrl.training.lora import ADAPTER, PREFIX, adapters_of, merged, peft_config, plain_names
from braidrl.training.optimizer import MASTER_BYTES, UNDIVIDED, MasterOptimizer, all_finite
from braidrl.weights.boxes import pattern_of
from braidrl.weights.checkpoint_files import HEAD, TensorReader, shapes_in
from braidrl.weights.file import ADAPTER as ADAPTER_WEIGHTS
from braidrl.weights.model_files import ModelFiles
from braidrl.weights.shards import as_dtensor, full_tensor, local_shard, shard_of

if TYPE_CHECKING:
    from braidrl.training.roles.worker import RoleWorker

OPTIMIZER = "optimizer.safetensors"
PARTS = "optimizer"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
)  # fmt: skip
Write = Callable[[], object]
"""Writes one file or folder of a checkpoint."""


def saving_tasks(worker: "RoleWorker", folder: Path, write: bool = True, copy: bool = False) -> list[Write]:
    """Return the calls that write model, tokenizer and optimizer into a new folder, in order.

    Every rank of a sharded model calls this; otherwise one rank of the role does.

    Args:
        worker: The role's worker on this rank.
        folder: The directory to make.
        write: True on the one rank that writes what all ranks have in full: rank 0, as transformers writes nothing on others.
        copy: Copy the tensors to host memory first, so that a thread can write while training continues.

    Raises:
        UserError: A tensor holds infinity or NaN; such a checkpoint must not replace a usable one.
    """
    kept = copied if copy else dict[str, Tensor]
    weights, adapters = full_state_dict(worker, wanted=write), dict[str, Tensor]()
    if worker.lora:
        for names, tensor in worker.ranks.full_tensors(adapters_of(dict(worker.model.named_parameters())), full_tensor):
            adapters |= dict.fromkeys(names, tensor)
    tensors = {**weights, **adapters, **(worker.optimizer.state() if worker.optimizer else {})}
    if not all_finite(local_shard(tensor) for tensor in tensors.values()):
        first = next(name for name, tensor in tensors.items() if not all_finite([local_shard(tensor)]))
        raise UserError(
            f"{worker.role}: {first} holds infinity or NaN and is not saved; resume from the last checkpoint, with a lower "
            "trainer.learning_rate or with trainer.max_grad_norm"
        )
    parts: list[Write] = []
    if write:
        parts.append(partial(write_model, worker, folder, kept(weights), kept(adapters)))
    if worker.optimizer is not None and worker.ranks.is_sharded:
        state, place = divided_state(worker.optimizer), folder / PARTS
        if copy:
            # Threads of several roles communicate concurrently: each role needs its own process group.
            worker.background = worker.background or background_group()
            started = dcp.async_save(state, checkpoint_id=place, process_group=worker.background)
            assert isinstance(started, Future)
            parts.append(started.result)
        else:
            parts.append(partial(dcp.save, state, checkpoint_id=place))
    elif worker.optimizer is not None and write:
        parts.append(partial(write_tensors, kept(worker.optimizer.state()), folder / OPTIMIZER))
    return parts


def write_model(worker: "RoleWorker", folder: Path, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
    """Write the model's Hugging Face directory, and the adapters beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if worker.lora:
        (folder / ADAPTER).mkdir(exist_ok=True)
        peft_config(worker.lora, worker.path, PREFIX + HEAD in adapters).save_pretrained(folder / ADAPTER)
        write_tensors(adapters, folder / ADAPTER / ADAPTER_WEIGHTS)
    save_weights(worker.model, folder, weights)
    if worker.side_files is None:
        worker.side_files = side_files(worker.model, worker.path)
    for name, content in worker.side_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def save_weights(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model's Hugging Face directory without its generation settings, which transformers may refuse to write."""
    generation = model.generation_config if model.can_generate() else None
    if generation is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if generation is not None:
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


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory; tied tensors stay tied."""
    found: dict[int, Tensor] = {}
    return {name: found.setdefault(id(t), t.detach().to("cpu", copy=True).contiguous()) for name, t in tensors.items()}


def full_state_dict(worker: "RoleWorker", wanted: bool = True) -> dict[str, Tensor]:
    """Return the full tensors of the model by name, with adapters merged and tied tensors under each of their names.

    All ranks of a sharded model call this at the same time. Gathered tensors go to host memory, so that a device holds one full tensor
    at a time. Ranks without `wanted` get an empty dict.
    """
    worker.ranks.reshard(worker.model)
    named = plain_names(worker.model, worker.model.state_dict(keep_vars=True))
    # Whether the module's parameters are the role's full weights.
    is_full = worker.lora is None and not worker.ranks.is_sharded
    found: dict[str, Tensor] = {}
    for names, tensor in worker.ranks.full_tensors(named, merged):
        if wanted:
            found |= dict.fromkeys(names, tensor if is_full else tensor.cpu())
    return found


@torch.no_grad()
def load_worker(worker: "RoleWorker", folder: Path) -> None:
    """Load a saved worker's weights and optimizer state in place. Raises UserError for damaged files or another model's."""
    worker.ranks.reshard(worker.model)
    if (folder / ADAPTER).is_dir() != bool(worker.lora):
        how, now = ("without", "remove it") if worker.lora else ("with", "set it as it was")
        raise UserError(
            f"{folder} was trained {how} trainer.lora or roles.{worker.role}.lora; {now} to go on from there"
        )
    # This rank's trained state, its global shapes over all ranks, and its saved counterpart.
    saved: Mapping[str, Tensor]
    kept, shapes = dict(worker.model.named_parameters()), worker.shapes
    if worker.lora:
        kept, shapes = adapters_of(kept), adapters_of(shapes)
        saved = load_file(folder / ADAPTER / ADAPTER_WEIGHTS)
    elif not worker.ranks.is_sharded:
        saved = dict(worker.load_model(folder).named_parameters())
    else:
        # A pipeline rank lacks the buffers of other ranks' layers: match buffer names by pattern.
        files = ModelFiles(folder, worker.model)
        buffers = {pattern_of(name) for name, _ in worker.model.named_buffers()}
        saved = files.without({name for name in files if pattern_of(name) in buffers})
    try:
        if shapes != shapes_in(saved):
            raise LookupError("the parameters have other names or shapes")
        # Read before anything is overwritten: the file may be damaged.
        state = optimizer_state(worker.optimizer, len(worker.shapes), folder) if worker.optimizer is not None else {}
    except LookupError as error:
        raise UserError(
            f"{folder} holds another model than {worker.path}; resume with the configuration it was made with"
        ) from error
    for name, parameter in kept.items():
        local_shard(parameter).copy_(shard_of(saved[name], parameter))
    if worker.optimizer is not None:
        worker.optimizer.load_state(state)
        if worker.dtype.itemsize < MASTER_BYTES and not any(key.endswith(".master") for key in state):
            names = {name: name for name, _ in worker.model.named_parameters()}
            masters: Mapping[str, Tensor] = saved if worker.lora else ModelFiles(folder, worker.model)
            names |= {own: name for name, own in adapters_of(names).items()} if worker.lora else {}
            worker.optimizer.read_masters(list(names.values()), masters)


def optimizer_state(optimizer: MasterOptimizer, parameters: int, folder: Path) -> dict[str, Tensor]:
    """Return this rank's shards of a saved optimizer state, written in any layout.

    Raises UserError for damaged files, and LookupError for the state of another model than one of so many `parameters`.
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
    """Return the tensor whose sharding a state tensor has: its parameter, or itself if it is a scalar or never sharded."""
    number, _, name = key.partition(".")
    return optimizer.by_number[int(number)] if tensor.dim() and name not in UNDIVIDED else tensor


def own_keys(optimizer: MasterOptimizer, parameters: int, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Return the keys of saved state whose parameters this rank holds. Raises LookupError if their names or shapes do not match."""
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
    if len(set(map(frozenset, names.values()))) > 1:
        raise LookupError(f"parameters have different state: {names}")
    return found

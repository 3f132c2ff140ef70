"""A worker on disk: a plain Hugging Face directory that anything can load, with the optimizer's tensors beside it.

    actor/  config.json  model.safetensors  tokenizer.json        whole, whatever the layout, adapters merged
            adapter/                                              where adapters alone are trained: they, as peft has them
            optimizer.safetensors                                 where each rank has the whole model
            optimizer/  .metadata  __0_0.distcp  __1_0.distcp     else: each rank writes its own parts

Either form of the optimizer's state is read under any layout.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoTokenizer

from braidrl.errors import UserError
from braidrl.models.lora import (
    ADAPTER,
    adapter_name,
    adapter_parameters,
    is_adapter,
    merged,
    plain_names,
    read_adapters,
    save_adapters,
)
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.parallel.shards import as_part, local_part, part_of, whole
from braidrl.models.roles.model import RoleModel
from braidrl.models.weight_files import WeightFiles, shapes_in

OPTIMIZER = "optimizer.safetensors"
PARTS = "optimizer"
Write = Callable[[], object]
"""Writes a part of a checkpoint."""


def save_worker(worker: RoleModel, folder: Path, write: bool = True) -> None:
    """Writes model, tokenizer and optimizer into `folder`, which is made.

    Of the ranks that have divided the model all call this and one has to `write` what is whole; of others that one alone calls it.
    """
    for part in saving_tasks(worker, folder, write):
        part()


def saving_tasks(worker: RoleModel, folder: Path, write: bool = True, beside: bool = False) -> list[Write]:
    """The parts of `save_worker` as calls, in their order. With `beside` they may be made in a thread while the worker trains on.

    They have copies in host memory then; what ranks write together has begun, and its call waits for it.
    """
    kept = copied if beside else dict[str, Tensor]
    weights = whole_weights(worker, wanted=write)
    adapters = whole_adapters(worker) if worker.lora else {}
    parts: list[Write] = []
    if write:
        parts.append(partial(write_model, worker, folder, kept(weights), kept(adapters)))
    if worker.optimizer is not None and worker.ranks.divided:
        state, place = divided_state(worker.optimizer), folder / PARTS
        if beside:
            # Threads of several roles meet their ranks at once: each role in a group of its own.
            worker.background = worker.background or dist.new_group(backend="gloo")
            begun = dcp.async_save(state, checkpoint_id=place, process_group=worker.background)
            assert isinstance(begun, Future)
            parts.append(begun.result)
        else:
            parts.append(partial(dcp.save, state, checkpoint_id=place))
    elif worker.optimizer is not None and write:
        parts.append(partial(write_tensors, kept(worker.optimizer.state()), folder / OPTIMIZER))
    return parts


def write_model(worker: RoleModel, folder: Path, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
    """What loads as a model, and the adapters beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if worker.lora:
        save_adapters(folder / ADAPTER, worker.lora, adapters, worker.path)
    worker.model.save_pretrained(folder, state_dict=weights)
    AutoTokenizer.from_pretrained(worker.path, local_files_only=True).save_pretrained(folder)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, tied tensors the same."""
    found: dict[int, Tensor] = {}
    return {name: found.setdefault(id(t), t.detach().to("cpu", copy=True).contiguous()) for name, t in tensors.items()}


def whole_weights(worker: RoleModel, wanted: bool = True) -> dict[str, Tensor]:
    """Every tensor of the model by its name, adapters merged, tied ones the same; none on a rank where they are not `wanted`.

    All ranks that have divided it call this at the same time. What is no tensor of the model itself goes to host memory, so that a
    device has one whole tensor at a time.
    """
    worker.ranks.settle(worker.model)
    named = plain_names(worker.model, worker.model.state_dict(keep_vars=True))
    found: dict[str, Tensor] = {}
    for names, tensor in worker.ranks.whole_tensors(named, merged):
        if wanted:
            found |= dict.fromkeys(names, tensor if worker.holds_its_weights else tensor.cpu())
    return found


def whole_adapters(worker: RoleModel) -> dict[str, Tensor]:
    """What is trained by peft's names; all ranks that have divided it call this at the same time."""
    named = adapter_parameters(worker.model)
    return {name: tensor for names, tensor in worker.ranks.whole_tensors(named, whole) for name in names}


@torch.no_grad()
def load_worker(worker: RoleModel, folder: Path) -> None:
    """Puts a saved worker's weights and optimizer into this one, in place. Raises UserError for another model's, or damaged ones."""
    worker.ranks.settle(worker.model)
    theirs = saved_parameters(worker, folder)
    if kept_shapes(worker) != shapes_in(theirs):
        raise another_model(worker, folder)
    # Read before anything is overwritten: it may be damaged.
    state = optimizer_state(worker, folder) if worker.optimizer is not None else {}
    for name, parameter in kept_parameters(worker).items():
        local_part(parameter).copy_(part_of(theirs[name], parameter))
    if worker.optimizer is not None:
        worker.optimizer.load_state(state)


def kept_parameters(worker: RoleModel) -> dict[str, Tensor]:
    """What this rank goes on from: every parameter, or of a worker with adapters, whose base is the model it began with, these."""
    return adapter_parameters(worker.model) if worker.lora else dict(worker.model.named_parameters())


def kept_shapes(worker: RoleModel) -> dict[str, torch.Size]:
    """The shapes of the same, of all ranks."""
    if not worker.lora:
        return worker.shapes
    return {adapter_name(name): shape for name, shape in worker.shapes.items() if is_adapter(name)}


def saved_parameters(worker: RoleModel, folder: Path) -> Mapping[str, Tensor]:
    """The same of a checkpoint. Raises UserError for one that was made with adapters where there are none now, or without."""
    if (folder / ADAPTER).is_dir() != bool(worker.lora):
        how, now = ("without", "remove it") if worker.lora else ("with", "set it as it was")
        raise UserError(
            f"{folder} was trained {how} trainer.lora or roles.{worker.role}.lora; {now} to go on from there"
        )
    if worker.lora:
        return read_adapters(folder / ADAPTER)
    return WeightFiles(folder) if worker.ranks.divided else dict(worker.load_model(folder).named_parameters())


def optimizer_state(worker: RoleModel, folder: Path) -> dict[str, Tensor]:
    """This rank's part of a saved optimizer's state, whoever wrote it."""
    optimizer = worker.optimizer
    assert optimizer is not None
    if (folder / OPTIMIZER).is_file():
        tensors = {key: tensor for key, tensor in load_file(folder / OPTIMIZER).items() if ours(worker, key)}
        return {key: part_of(tensor, owner(optimizer, key, tensor)) for key, tensor in tensors.items()}
    try:
        known = dcp.FileSystemReader(folder / PARTS).read_metadata().state_dict_metadata
        wanted = {key: empty_part(optimizer, key, about) for key, about in known.items() if ours(worker, key)}
        with warnings.catch_warnings():
            # That each rank reads for itself what it needs is meant, and nothing to warn of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wanted, checkpoint_id=folder / PARTS, no_dist=True)
    except LookupError as error:
        raise another_model(worker, folder) from error
    except (CheckpointException, OSError, EOFError, RuntimeError) as error:
        raise UserError(
            f"{folder / PARTS} is damaged or incomplete; resume from an older checkpoint, or copy it whole"
        ) from error
    return {key: local_part(tensor) for key, tensor in wanted.items()}


def divided_state(optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """The optimizer's state with tensors that know the whole that they are a part of."""
    return {key: as_part(tensor, owner(optimizer, key, tensor)) for key, tensor in optimizer.state().items()}


def ours(worker: RoleModel, key: str) -> bool:
    """False for what only other ranks have of this model. Raises LookupError for another model's."""
    assert worker.optimizer is not None
    number = key.split(".")[0]
    if not number.isdecimal() or int(number) in worker.optimizer.by_number:
        return True
    if int(number) >= len(worker.shapes):
        raise LookupError(f"{key} is of another model: this one has {len(worker.shapes)} parameters")
    return False


def owner(optimizer: MasterOptimizer, key: str, tensor: Tensor) -> Tensor:
    """What a tensor of the state is divided like: its parameter, or for a count itself."""
    return optimizer.by_number[int(key.split(".")[0])] if tensor.dim() else tensor


def empty_part(optimizer: MasterOptimizer, key: str, about: object) -> Tensor:
    """Where a saved tensor is read to. Raises LookupError where it is no parameter's of this model."""
    assert isinstance(about, TensorStorageMetadata)
    if not about.size:
        return torch.empty((), dtype=about.properties.dtype)
    parameter = optimizer.by_number[int(key.split(".")[0])]
    if parameter.shape != about.size:
        raise LookupError(f"{key} is {tuple(about.size)} and the parameter {tuple(parameter.shape)}")
    return as_part(torch.empty_like(local_part(parameter), dtype=about.properties.dtype), parameter)


def another_model(worker: RoleModel, folder: Path) -> UserError:
    return UserError(f"{folder} holds another model than {worker.path}; resume with the configuration it was made with")


def describe_worker(folder: Path) -> str:
    """One line about a saved model: its architecture and size on disk."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != OPTIMIZER)
    return f"{architecture}, {size / 2**20:.1f} MiB of weights"

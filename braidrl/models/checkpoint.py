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
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoTokenizer

from braidrl.errors import UserError
from braidrl.models.lora import ADAPTER, adapter_parameters, merged, plain_names, read_adapters, save_adapters
from braidrl.models.optimizer import MasterOptimizer
from braidrl.models.parts import as_part, local_part, part_of, whole

if TYPE_CHECKING:
    from braidrl.models.role_worker import RoleWorker

OPTIMIZER = "optimizer.safetensors"
PARTS = "optimizer"


def save_worker(worker: RoleWorker, folder: Path, write: bool = True) -> None:
    """Writes model, tokenizer and optimizer into `folder`, which is made.

    Of the ranks that have divided the model all call this and one has to `write` what is whole; of others that one alone calls it.
    """
    weights = whole_weights(worker)
    adapters = {name: whole(p) for name, p in adapter_parameters(worker.model).items()} if worker.lora else {}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        if worker.lora:
            save_adapters(folder / ADAPTER, worker.lora, adapters, worker.path)
        worker.model.save_pretrained(folder, state_dict=weights)
        AutoTokenizer.from_pretrained(worker.path, local_files_only=True).save_pretrained(folder)
    if worker.optimizer is None:
        return
    if worker.ranks.divided:
        dcp.save(divided_state(worker.optimizer), checkpoint_id=folder / PARTS)
    elif write:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in worker.optimizer.state().items()}
        save_file(tensors, folder / OPTIMIZER)


def whole_weights(worker: RoleWorker) -> dict[str, Tensor]:
    """Every tensor of the model by its name, adapters merged, tied ones the same.

    All ranks that have divided it call this at the same time.
    """
    worker.ranks.settle(worker.model)
    found: dict[int, Tensor] = {}
    named = plain_names(worker.model, worker.model.state_dict(keep_vars=True))
    return {name: found.setdefault(id(tensor), merged(tensor)) for name, tensor in named.items()}


@torch.no_grad()
def load_worker(worker: RoleWorker, folder: Path) -> None:
    """Puts a saved worker's weights and optimizer into this one, in place. Raises UserError for another model's, or damaged ones."""
    worker.ranks.settle(worker.model)
    ours, theirs = kept_parameters(worker), saved_parameters(worker, folder)
    shapes = {name: tuple(p.shape) for name, p in ours.items()}
    if shapes != {name: tuple(p.shape) for name, p in theirs.items()}:
        raise another_model(worker, folder)
    # Read before anything is overwritten: it may be damaged.
    state = optimizer_state(worker, folder) if worker.optimizer is not None else {}
    for name, parameter in ours.items():
        local_part(parameter).copy_(part_of(theirs[name], parameter))
    if worker.optimizer is not None:
        worker.optimizer.load_state(state)


def kept_parameters(worker: RoleWorker) -> dict[str, Tensor]:
    """What a worker goes on from: every parameter, or of one with adapters, whose base is the model it began with, these."""
    return adapter_parameters(worker.model) if worker.lora else dict(worker.model.named_parameters())


def saved_parameters(worker: RoleWorker, folder: Path) -> dict[str, Tensor]:
    """The same of a checkpoint. Raises UserError for one that was made with adapters where there are none now, or without."""
    if (folder / ADAPTER).is_dir() != bool(worker.lora):
        how, now = ("without", "remove it") if worker.lora else ("with", "set it as it was")
        raise UserError(
            f"{folder} was trained {how} trainer.lora or roles.{worker.role}.lora; {now} to go on from there"
        )
    if worker.lora:
        return read_adapters(folder / ADAPTER)
    return dict(worker.load_model(folder).named_parameters())


def optimizer_state(worker: RoleWorker, folder: Path) -> dict[str, Tensor]:
    """This rank's part of a saved optimizer's state, whoever wrote it."""
    optimizer = worker.optimizer
    assert optimizer is not None
    if (folder / OPTIMIZER).is_file():
        tensors = load_file(folder / OPTIMIZER)
        return {key: part_of(tensor, owner(optimizer, key, tensor)) for key, tensor in tensors.items()}
    try:
        known = dcp.FileSystemReader(folder / PARTS).read_metadata().state_dict_metadata
        wanted = {key: empty_part(optimizer, key, about) for key, about in known.items()}
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


def owner(optimizer: MasterOptimizer, key: str, tensor: Tensor) -> Tensor:
    """What a tensor of the state is divided like: its parameter, or for a count itself. Raises IndexError for another model's."""
    return optimizer.parameters[int(key.split(".")[0])] if tensor.dim() else tensor


def empty_part(optimizer: MasterOptimizer, key: str, about: object) -> Tensor:
    """Where a saved tensor is read to. Raises LookupError where it is no parameter's of this model."""
    assert isinstance(about, TensorStorageMetadata)
    if not about.size:
        return torch.empty((), dtype=about.properties.dtype)
    parameter = optimizer.parameters[int(key.split(".")[0])]
    if parameter.shape != about.size:
        raise LookupError(f"{key} is {tuple(about.size)} and the parameter {tuple(parameter.shape)}")
    return as_part(torch.empty_like(local_part(parameter), dtype=about.properties.dtype), parameter)


def another_model(worker: RoleWorker, folder: Path) -> UserError:
    return UserError(f"{folder} holds another model than {worker.path}; resume with the configuration it was made with")


def describe_worker(folder: Path) -> str:
    """One line about a saved model: its architecture and size on disk."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != OPTIMIZER)
    return f"{architecture}, {size / 2**20:.1f} MiB of weights"

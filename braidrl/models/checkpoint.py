"""A worker on disk: a plain Hugging Face directory that anything can load, with the optimizer's tensors beside it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from braidrl.errors import UserError
from braidrl.models.role_worker import RoleWorker

OPTIMIZER = "optimizer.safetensors"


def save_worker(worker: RoleWorker, folder: Path) -> None:
    """Writes model, tokenizer and optimizer into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    worker.model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(worker.path, local_files_only=True).save_pretrained(folder)
    if worker.optimizer is not None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in worker.optimizer.state().items()}
        save_file(tensors, folder / OPTIMIZER)


@torch.no_grad()
def load_worker(worker: RoleWorker, folder: Path) -> None:
    """Puts a saved worker's weights and optimizer into this one, in place. Raises UserError for another model's."""
    saved = worker.load_model(folder)
    ours, theirs = dict(worker.model.named_parameters()), dict(saved.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in ours.items()}
    if shapes != {name: tuple(p.shape) for name, p in theirs.items()}:
        raise UserError(
            f"{folder} holds another model than {worker.path}; resume with the configuration it was made with"
        )
    for name, parameter in ours.items():
        parameter.copy_(theirs[name])
    if worker.optimizer is not None:
        worker.optimizer.load_state(load_file(folder / OPTIMIZER))


def describe_worker(folder: Path) -> str:
    """One line about a saved model: its architecture and size on disk."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.name != OPTIMIZER)
    return f"{architecture}, {size / 2**20:.1f} MiB of weights"

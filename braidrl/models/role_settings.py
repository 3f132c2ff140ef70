"""What the configuration says of one role: its own settings where it has them, and else the run's."""

from __future__ import annotations

from pathlib import Path

import torch

from braidrl.config import Config, LoraConfig
from braidrl.models.layout import ParallelLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_device(name: str) -> torch.device:
    """`auto` takes the CUDA device where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def model_path(role: str, config: Config) -> Path:
    """The directory that a role's model comes from: its own, or the run's."""
    own = config.roles.get(role)
    return Path((own and own.model) or config.model)


def layout_of(role: str, config: Config) -> ParallelLayout:
    """How a role lies on its devices: as it says itself, or as the run's roles do."""
    own = config.roles.get(role)
    return (own and own.layout) or config.trainer.layout


def lora_of(role: str, config: Config) -> LoraConfig | None:
    """The adapters that a role is trained with, if it is: as it says itself, or as the run's roles do."""
    own = config.roles.get(role)
    return (own and own.lora) or config.trainer.lora


def layout_key(role: str, config: Config) -> str:
    """Where in the configuration the role's layout stands."""
    own = config.roles.get(role)
    return f"roles.{role}.layout" if own and own.layout else "trainer.layout"

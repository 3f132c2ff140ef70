"""What the configuration says of one role: its own settings where it has them, and else the run's."""

from __future__ import annotations

from pathlib import Path

import torch

from braidrl.config import Config, LoraConfig, RoleConfig
from braidrl.flow import Flow, Kind
from braidrl.models.parallel.layout import ParallelLayout

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


def max_tokens_of(role: str, config: Config) -> int:
    """Return the most tokens of a micro-batch of a role: as it says itself, or as the run's roles do."""
    own = config.roles.get(role)
    return (own and own.max_tokens_per_device) or config.trainer.max_tokens_per_device


def checkpoints_activations(role: str, config: Config) -> bool:
    """Return whether a role computes activations again in its backward pass."""
    own = config.roles.get(role)
    said = own.activation_checkpointing if own else None
    return config.trainer.activation_checkpointing if said is None else said


def inference_layouts(config: Config, flow: Flow) -> dict[str, ParallelLayout]:
    """By role, the layout of a second copy of its weights: of trained roles that infer in another layout than they train in."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    found = {}
    for role in flow.trained_roles:
        own = config.roles.get(role)
        layout = (own and own.inference_layout) or config.trainer.inference_layout
        if role in infer and layout and layout != layout_of(role, config):
            found[role] = layout
    return found


def with_layout(role: str, config: Config, layout: ParallelLayout) -> Config:
    """The configuration with another layout of one role."""
    own = config.roles.get(role, RoleConfig())
    roles = {**config.roles, role: own.model_copy(update={"layout": layout})}
    return config.model_copy(update={"roles": roles})


def inference_layout_key(role: str, config: Config) -> str:
    """Where in the configuration the layout in which a role infers stands."""
    own = config.roles.get(role)
    return f"roles.{role}.inference_layout" if own and own.inference_layout else "trainer.inference_layout"


def layout_key(role: str, config: Config) -> str:
    """Where in the configuration the role's layout stands."""
    own = config.roles.get(role)
    return f"roles.{role}.layout" if own and own.layout else "trainer.layout"

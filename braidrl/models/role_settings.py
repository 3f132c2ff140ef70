"""A role's settings: its own in the configuration's `roles`, else the run's."""

from pathlib import Path

import torch

from braidrl.config import Config, LoraConfig, RoleConfig
from braidrl.flow import Flow, Kind
from braidrl.models.parallel.layout import ParallelLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def model_path(role: str, config: Config) -> Path:
    """Return the role's model directory: its own, or the run's."""
    own = config.roles.get(role)
    return Path((own and own.model) or config.model)


def dtype_of(role: str, config: Config) -> torch.dtype:
    """Return the type of a role's weights: its own, or the run's."""
    own = config.roles.get(role)
    return DTYPES[(own and own.dtype) or config.dtype]


def backend_of(role: str, config: Config) -> str:
    """Return the name of the training backend that has a role: its own, or the run's."""
    own = config.roles.get(role)
    return (own and own.backend) or config.trainer.backend


def learning_rate_of(role: str, config: Config) -> float:
    """Return a role's learning rate after warm-up: its own, or the run's."""
    own = config.roles.get(role)
    return config.trainer.learning_rate if own is None or own.learning_rate is None else own.learning_rate


def layout_of(role: str, config: Config) -> ParallelLayout:
    """Return the role's parallel layout: its own, or the trainer's."""
    own = config.roles.get(role)
    return (own and own.layout) or config.trainer.layout


def lora_of(role: str, config: Config) -> LoraConfig | None:
    """Return the role's adapter settings: its own, or the trainer's; None where it is trained in full."""
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
    """Return the inference layout of each trained role that infers in another layout than it trains in."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    found = {}
    for role in flow.trained_roles:
        own = config.roles.get(role)
        layout = (own and own.inference_layout) or config.trainer.inference_layout
        if role in infer and layout and layout != layout_of(role, config):
            found[role] = layout
    return found


def with_layout(role: str, config: Config, layout: ParallelLayout) -> Config:
    """Return the configuration with another layout of one role."""
    own = config.roles.get(role, RoleConfig())
    roles = {**config.roles, role: own.model_copy(update={"layout": layout})}
    return config.model_copy(update={"roles": roles})


def inference_layout_key(role: str, config: Config) -> str:
    """Return the configuration key that sets the role's inference layout."""
    own = config.roles.get(role)
    return f"roles.{role}.inference_layout" if own and own.inference_layout else "trainer.inference_layout"


def layout_key(role: str, config: Config) -> str:
    """Return the configuration key that sets the role's layout."""
    own = config.roles.get(role)
    return f"roles.{role}.layout" if own and own.layout else "trainer.layout"

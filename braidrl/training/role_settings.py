"""Settings of a role: its own under `roles`, else those of the run."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from braidrl.cluster.devices import choose_device, has_bfloat16
from braidrl.config import Config, LoraConfig, RoleConfig
from braidrl.config.layout import ParallelLayout
from braidrl.flow import Flow, Kind
from braidrl.training.loading import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
USUAL_SLOTS, USUAL_TOKENS = 64, 8192
"""Default rows decoded at once and default tokens of a micro-batch, if neither the user nor the device's memory decides them."""
MOST_SLOTS = 1024
"""Rows of an engine beyond which decoding hardly gets faster."""
HIGHEST_USUAL_RATE = 0.01
"""Highest usual learning rate of AdamW on all weights; adapters use about ten times as much."""


def own_settings(role: str, config: Config) -> RoleConfig:
    """Return the configuration of one role."""
    return config.roles.get(role) or RoleConfig()


def model_path(role: str, config: Config) -> Path:
    """Return the role's model directory: its own, or the run's."""
    return Path(own_settings(role, config).model or config.model)


def own_tokenizer(role: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a role's own model if its vocabulary differs from `tokenizer`, else None."""
    path = model_path(role, config)
    if path == config.model:
        return None
    own = load_tokenizer(path)
    return own if own.get_vocab() != tokenizer.get_vocab() else None


def dtype_of(role: str, config: Config) -> torch.dtype:
    """Return the dtype of a role's weights: its own, or the run's."""
    return DTYPES[dtype_name(role, config)]


def dtype_name(role: str, config: Config) -> str:
    """Return the dtype name of a role's weights: its own, or the run's on its type of device."""
    name = own_settings(role, config).dtype or config.dtype
    if name != "auto":
        return name
    on_cuda = choose_device(config.device).type == "cuda"
    return "bfloat16" if on_cuda and has_bfloat16() else "float32"


def backend_of(role: str, config: Config) -> str:
    """Return the name of a role's training backend: its own, or the run's."""
    return own_settings(role, config).backend or config.trainer.backend


def learning_rate_of(role: str, config: Config) -> float:
    """Return a role's learning rate after warm-up: its own, or the run's."""
    rate = own_settings(role, config).learning_rate
    return config.trainer.learning_rate if rate is None else rate


def layout_of(role: str, config: Config) -> ParallelLayout:
    """Return the role's parallel layout: its own, or the trainer's."""
    return own_settings(role, config).layout or config.trainer.layout


def lora_of(role: str, config: Config) -> LoraConfig | None:
    """Return the role's adapter settings: its own, or the trainer's; None without adapters."""
    return own_settings(role, config).lora or config.trainer.lora


def merges_adapters(lora: LoraConfig | None, config: Config) -> bool:
    """Return whether engines of this process use a merged copy of the weights instead of separate adapters.

    Compiled CPU kernels only decode merged weights; on CUDA, memory is scarcer, so adapters are applied separately.
    """
    return lora is not None and lora.base_dtype is None and choose_device(config.device).type == "cpu"


def max_tokens_of(role: str, config: Config) -> int:
    """Return the most tokens in a role's micro-batch: its own setting, or the run's."""
    return own_settings(role, config).max_tokens_per_device or usual_max_tokens(config)


def usual_max_tokens(config: Config) -> int:
    """Return the most tokens in a micro-batch of a role without its own setting."""
    return config.trainer.max_tokens_per_device or USUAL_TOKENS


def slots_of(config: Config) -> int:
    """Return the number of rows that an engine decodes at once, at most."""
    if config.rollout.slots == "auto":
        return min(MOST_SLOTS, config.trainer.prompts_per_step * config.rollout.samples_per_prompt)
    return config.rollout.slots or USUAL_SLOTS


def checkpoints_activations(role: str, config: Config) -> bool:
    """Return whether a role recomputes activations in its backward pass."""
    own = own_settings(role, config).activation_checkpointing
    return config.trainer.activation_checkpointing if own is None else own


def inference_layouts(config: Config, flow: Flow) -> dict[str, ParallelLayout]:
    """Return the inference layout of each trained role whose inference and training layouts differ."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    found = {}
    for role in flow.trained_roles:
        layout = own_settings(role, config).inference_layout or config.trainer.inference_layout
        if role in infer and layout and layout != layout_of(role, config):
            found[role] = layout
    return found


def with_layout(role: str, config: Config, layout: ParallelLayout) -> Config:
    """Return the configuration with another layout of one role."""
    roles = {**config.roles, role: own_settings(role, config).model_copy(update={"layout": layout})}
    return config.model_copy(update={"roles": roles})


def inference_layout_key(role: str, config: Config) -> str:
    """Return the configuration key that sets the role's inference layout."""
    return (
        f"roles.{role}.inference_layout" if own_settings(role, config).inference_layout else "trainer.inference_layout"
    )


def layout_key(role: str, config: Config) -> str:
    """Return the configuration key that sets the role's layout."""
    return f"roles.{role}.layout" if own_settings(role, config).layout else "trainer.layout"


def lora_key(role: str, config: Config) -> str:
    """Return the configuration key that sets the role's adapters."""
    return f"roles.{role}.lora" if own_settings(role, config).lora else "trainer.lora"


def unusual_rates(config: Config, flow: Flow) -> list[str]:
    """Return a warning for each trained role with an unusually high learning rate for AdamW."""
    lines = []
    for role in flow.trained_roles if config.trainer.optimizer.startswith("adamw") else ():
        rate, most = learning_rate_of(role, config), HIGHEST_USUAL_RATE * (10 if lora_of(role, config) else 1)
        if rate > most:
            lines.append(
                f"the learning rate of {role} is {rate:g}; RL trains at 1e-7 to 1e-4, and beyond {most:g} AdamW rarely learns"
            )
    return lines

"""Settings of a role: those under `roles`, otherwise those of the run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from braidrl.cluster.devices import choose_device, has_bfloat16
from braidrl.config import Config, LoraConfig, RoleConfig
from braidrl.config.layout import ParallelLayout
from braidrl.deferred import torch
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.flow import policies_of

USUAL_SLOTS, USUAL_TOKENS = 64, 8192
"""Default rows decoded at once and default tokens of a micro-batch, unless user or memory decide them."""
MOST_SLOTS = 1024
"""Rows of an engine beyond which decoding hardly gets faster."""
HIGHEST_USUAL_RATE = 0.01
"""Highest usual learning rate of AdamW on all weights; adapters use about ten times as much."""


@dataclass(frozen=True)
class RoleSettings:
    """The settings that hold for one role: those under `roles.ROLE`, otherwise the run's."""

    role: str
    overridden: frozenset[str]
    """The names of the settings under `roles.ROLE`."""
    model: Path
    device: str
    configured_dtype: str
    backend: str
    learning_rate: float
    """The learning rate after warm-up."""
    max_tokens: int
    activation_checkpointing: bool
    layout: ParallelLayout
    inference_layout: ParallelLayout | None
    lora: LoraConfig | None
    trains_vision: bool
    """True if training changes the vision tower, directly or by adapters."""

    @property
    def dtype_name(self) -> str:
        """Return the name of the weights' dtype; `auto` is resolved by the type of device."""
        if self.configured_dtype != "auto":
            return self.configured_dtype
        on_cuda = choose_device(self.device).type == "cuda"
        return "bfloat16" if on_cuda and has_bfloat16() else "float32"

    @property
    def dtype(self) -> "torch.dtype":
        return dtype_named(self.dtype_name)

    def key(self, name: str) -> str:
        """Return the configuration key that sets one of these settings."""
        if name in self.overridden:
            return f"roles.{self.role}.{name}"
        return name if name in ("model", "dtype") else f"trainer.{name}"


def dtype_named(name: str) -> "torch.dtype":
    """Return the torch dtype of a configured `dtype`, as in `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def settings_of(role: str, config: Config) -> RoleSettings:
    role_config, trainer = config.roles.get(role) or RoleConfig(), config.trainer
    rate, checkpointing = role_config.learning_rate, role_config.activation_checkpointing
    lora = role_config.lora or trainer.lora
    return RoleSettings(
        role=role,
        overridden=frozenset(name for name in RoleConfig.model_fields if getattr(role_config, name) is not None),
        model=Path(role_config.model or config.model),
        device=config.device,
        configured_dtype=role_config.dtype or config.dtype,
        backend=role_config.backend or trainer.backend,
        learning_rate=trainer.learning_rate if rate is None else rate,
        max_tokens=role_config.max_tokens_per_device or trainer.max_tokens_per_device or USUAL_TOKENS,
        activation_checkpointing=trainer.activation_checkpointing if checkpointing is None else checkpointing,
        layout=role_config.layout or trainer.layout,
        inference_layout=role_config.inference_layout or trainer.inference_layout,
        lora=lora,
        trains_vision=trainer.train_vision or bool(lora and lora.vision_targets),
    )


def inference_layouts(config: Config, flow: Flow) -> dict[str, ParallelLayout]:
    """Return the inference layout of each trained role whose inference and training layouts differ."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    trained = [settings_of(role, config) for role in flow.trained_roles if role in infer]
    return {
        settings.role: settings.inference_layout
        for settings in trained
        if settings.inference_layout not in (None, settings.layout)
    }


def sharing_base(config: Config, stages: Iterable[Stage]) -> tuple[str, ...]:
    """Return the roles whose adapters one engine serves on one base model (`rollout.shared_base`)."""
    together = [policies_of(stage) for stage in stages] if config.rollout.shared_base else []
    return tuple(dict.fromkeys(role for roles in together if len(roles) > 1 for role in roles))


def merges_adapters(lora: LoraConfig | None, config: Config) -> bool:
    """Return True if engines of this process use a merged copy of the weights instead of separate adapters.

    Compiled CPU kernels only decode merged weights; on CUDA, memory is scarcer, so adapters are applied separately.
    """
    return lora is not None and lora.base_dtype is None and choose_device(config.device).type == "cpu"


def slots_of(config: Config) -> int:
    """Return the maximum number of rows that an engine decodes together."""
    if config.rollout.slots == "auto":
        return min(MOST_SLOTS, config.trainer.prompts_per_step * config.rollout.samples_per_prompt)
    return config.rollout.slots or USUAL_SLOTS


def unusual_rates(config: Config, flow: Flow) -> list[str]:
    """Return a warning for each trained role with an unusually high learning rate for AdamW."""
    lines = []
    for role in flow.trained_roles if config.trainer.optimizer.startswith("adamw") else ():
        settings = settings_of(role, config)
        rate, most = settings.learning_rate, HIGHEST_USUAL_RATE * (10 if settings.lora else 1)
        if rate > most:
            lines.append(
                f"the learning rate of {role} is {rate:g}; RL trains at 1e-7 to 1e-4, and beyond {most:g} AdamW "
                "rarely learns"
            )
    return lines

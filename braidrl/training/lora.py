"""Low-rank adapters (LoRA) by peft: only adapters are trained; the role's weights are base and adapters merged.

training     y = x Wᵀ + α/r · (x Aᵀ) Bᵀ          W frozen, A and B trained
elsewhere    W + α/r · B A                        exports, engines, and copies of this role's weights
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braidrl.config import LoraConfig
from braidrl.errors import UserError, suggest
from braidrl.training.four_bit import FourBitLinear
from braidrl.weights.boxes import Box
from braidrl.weights.checkpoint_files import HEAD
from braidrl.weights.shards import box_of, full_tensor, local_shard

ADAPTER = "adapter"
"""The folder of the adapters in a role's checkpoint, in peft's format."""
NAME = "default"
PREFIX = "base_model.model."
"""The prefix of tensor names in peft's files."""


def import_peft() -> Any:
    """Import peft. Raises UserError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError("lora needs peft; install it by `pip install 'braidrl[lora]'`") from error
    return peft


def add_adapters(model: Any, lora: LoraConfig, seed: int = 0) -> None:
    """Add adapters to a decoder's linear layers in place; outputs stay equal until the adapters are trained.

    The same seed gives the same adapters in every process. Raises UserError for a target that the model lacks.
    """
    peft = import_peft()
    linear = {name.rpartition(".")[2] for name, m in model.base_model.named_modules() if isinstance(m, nn.Linear)}
    for target in lora.targets:
        if target not in linear:
            raise UserError(
                f"lora.targets: {type(model).__name__} has no linear layer {target!r} in its layers. "
                f"{suggest(target, linear)}"
            )
    # Hide the model type: otherwise peft also adapts fused experts, which are not linear layers and would not be merged.
    known = model.config.model_type
    model.config.model_type = "decoder"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(peft_config(lora), model, NAME)
    finally:
        model.config.model_type = known
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)
    train_adapters_only(model)


def peft_config(lora: LoraConfig, model: Path | None = None, head: bool = False) -> Any:
    """Return peft's configuration; with `head`, the scalar head is trained in full."""
    return import_peft().LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=list(lora.targets), bias="none",
        base_model_name_or_path=str(model) if model else None, task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=["score"] if head else None,
    )  # fmt: skip


def adapter_config(lora: LoraConfig) -> str:
    """Return the text of peft's `adapter_config.json`."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "target_modules": list(lora.targets), "bias": "none",
    }  # fmt: skip
    return json.dumps(config)


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything except adapters and a scalar head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether LoRA trains a parameter: an adapter's factor or a scalar head."""
    return ".lora_" in name or name == HEAD


def adapter_name(name: str) -> str:
    """Return a parameter's name in peft's files."""
    return PREFIX + name.replace(f".{NAME}.", ".")


class Adapted:
    """A weight (out, in) with its adapter: `down` (rank, in) and `up` (out, rank)."""

    def __init__(self, layer: nn.Linear | FourBitLinear, down: Tensor, up: Tensor, scaling: float) -> None:
        """Describe the weight of the `layer` under the adapter."""
        self.layer, self.down, self.up, self.scaling = layer, down, up, scaling
        self.shape, self.device = torch.Size((layer.out_features, layer.in_features)), up.device
        is_four_bit = isinstance(layer, FourBitLinear)  # its weight is decoded at each access
        self.dtype = layer.dtype if isinstance(layer, FourBitLinear) else layer.weight.dtype
        self.box = Box.whole(self.shape) if is_four_bit else box_of(layer.weight)
        self.is_sharded = isinstance(up, DTensor)

    @torch.no_grad()
    def merged_part(self, whole: bool = False) -> Tensor:
        """Return this rank's shard, or the `whole` tensor, of base + scaling · up down, rounded once.

        All ranks of a sharded model call this at the same time: adapters are small and are gathered in full.
        """
        weight = self.layer.weight
        base, box = (full_tensor(weight), Box.whole(self.shape)) if whole else (local_shard(weight), self.box)
        rows, columns = box.slices
        up, down = full_tensor(self.up)[rows], full_tensor(self.down)[:, columns]
        dtype = torch.promote_types(base.dtype, torch.float32)
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype), alpha=self.scaling).to(base.dtype)


def plain_names(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor | Adapted]:
    """Return a module's tensors by their names without adapters; adapted weights come with their adapters."""
    found: dict[str, Tensor | Adapted] = {}
    for name, tensor in named.items():
        layer, _, own = name.partition(".base_layer.")
        if own in ("weight", "codes"):
            module: Any = model.get_submodule(layer)
            down, up = module.lora_A[NAME].weight, module.lora_B[NAME].weight
            found[f"{layer}.weight"] = Adapted(module.base_layer, down, up, float(module.scaling[NAME]))
        elif own == "scales":
            continue
        elif own:
            found[f"{layer}.{own}"] = tensor
        elif ".lora_" not in name:
            found[name] = tensor
    return found


def merged(tensor: Tensor | Adapted) -> Tensor:
    """Return the full tensor, with its adapter merged if it has one; all ranks of a sharded model call this at the same time."""
    return tensor.merged_part(whole=True) if isinstance(tensor, Adapted) else full_tensor(tensor)


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by peft's names."""
    return {adapter_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

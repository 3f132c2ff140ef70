"""Low-rank adapters (LoRA) by peft: only adapters are trained; the role's weights are base and adapters merged.

training     y = x Wᵀ + α/r · (x Aᵀ) Bᵀ          W frozen, A and B trained
elsewhere    W + α/r · B A                        exports, engines, and copies of this role's weights

The frozen weights may be kept in 4 bits (QLoRA) by bitsandbytes, so that only one layer's weight exists in full at a
time. Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".

W (out, in) ─64 at a time─▶ NormalFloat codes, two per byte, and a scale per block
    ─dequantised in each product─▶ x Wᵀ + b
"""

import json
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braidrl.config import LoraConfig
from braidrl.errors import UserError, suggest
from braidrl.training.decoders.body import decoder_of
from braidrl.weights.boxes import Box
from braidrl.weights.checkpoint_files import HEAD
from braidrl.weights.shards import box_of, full_tensor, local_shard

T = TypeVar("T")
ADAPTER = "adapter"
"""The folder of the adapters in a role's checkpoint, in peft's format."""
NAME = "default"
PREFIX = "base_model.model."
"""The prefix of tensor names in peft's files."""
BLOCK = 64
"""Weights in 4 bits that share a scale."""
KIND = "nf4"
BYTES_PER_WEIGHT = 0.5 + torch.float32.itemsize / BLOCK
# bitsandbytes, which peft also imports, warns about kernels on the model hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def import_optional(package: str, key: str, extra: str) -> Any:
    """Import peft or bitsandbytes.

    Raises UserError, naming the configuration `key` that needs it, if it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"{key} needs {package}; install it by `pip install 'braidrl[{extra}]'`") from error


def add_adapters(model: Any, lora: LoraConfig, seed: int = 0) -> None:
    """Add adapters to a decoder's layers, the same for a seed; outputs do not change yet.

    Raises UserError for a target that it lacks.
    """
    peft = import_optional("peft", "lora", "lora")
    decoder = decoder_of(model)
    linear = {name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    for target in lora.targets:
        if target not in linear:
            raise UserError(
                f"lora.targets: {type(model).__name__} has no linear layer {target!r} in its layers. "
                f"{suggest(target, linear)}"
            )
    # Hide the model type: otherwise peft also adapts fused experts, which are not linear layers and would not be
    # merged.
    known = decoder.config.model_type
    decoder.config.model_type = "decoder"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(peft_config(lora), decoder, NAME)
    finally:
        decoder.config.model_type = known
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)
        parameter.requires_grad_(is_adapter(name))


def start_from(model: nn.Module, saved: Mapping[str, Tensor], path: Path) -> None:
    """Copy adapters that were read from a file in peft's format into those of a model.

    Raises UserError if they are of another model.
    """
    wanted = adapters_of(dict(model.named_parameters()))
    shapes, given = ({name: tuple(one.shape) for name, one in each.items()} for each in (wanted, saved))
    if unlike := sorted(name for name in shapes | given if shapes.get(name) != given.get(name)):
        name = unlike[0]
        raise UserError(
            f"lora.adapter: {path} is of another model: {name} is {given.get(name, 'missing')} there, and "
            f"{shapes.get(name, 'missing')} in {type(model).__name__}"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


def peft_config(lora: LoraConfig, model: Path | None = None, head: bool = False) -> Any:
    """Return peft's configuration; with `head`, the scalar head is trained in full."""
    return import_optional("peft", "lora", "lora").LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets),
        bias="none",
        base_model_name_or_path=str(model) if model else None,
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=["score"] if head else None,
    )


def adapter_config(lora: LoraConfig) -> str:
    return json.dumps(peft_config(lora).to_dict(), default=sorted)


def is_adapter(name: str) -> bool:
    """Return whether LoRA trains a parameter: an adapter's factor or a scalar head."""
    return ".lora_" in name or name == HEAD


def adapters_of(named: Mapping[str, T]) -> dict[str, T]:
    """Return what LoRA trains among named parameters, or their shapes, by peft's names."""
    return {PREFIX + name.replace(f".{NAME}.", "."): value for name, value in named.items() if is_adapter(name)}


class FourBitLinear(nn.Module):
    """A linear layer with a frozen 4-bit weight; only its input gets a gradient."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        functional = import_optional("bitsandbytes", "lora.base_dtype", "bits").functional
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        codes, state = functional.quantize_4bit(linear.weight.detach(), blocksize=BLOCK, quant_type=KIND)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", state.absmax)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """Return the dequantised weight (out, in) in its original dtype."""
        shape = [self.out_features, self.in_features]
        return torch.ops.bitsandbytes.dequantize_4bit(self.codes, self.scales, BLOCK, KIND, shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _FourBitProduct.apply(x, self)
        return result if self.bias is None else result + self.bias


class _FourBitProduct(torch.autograd.Function):
    """The product x Wᵀ, which saves the codes instead of the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight, None


class Adapted:
    """A weight (out, in) with its adapter: `down` (rank, in) and `up` (out, rank)."""

    def __init__(self, layer: nn.Linear | FourBitLinear, down: Tensor, up: Tensor, scaling: float) -> None:
        self.layer, self.down, self.up, self.scaling = layer, down, up, scaling
        self.shape, self.device = torch.Size((layer.out_features, layer.in_features)), up.device
        is_four_bit = isinstance(layer, FourBitLinear)  # its weight is decoded at each access
        self.dtype = layer.dtype if isinstance(layer, FourBitLinear) else layer.weight.dtype
        self.box = Box.whole(self.shape) if is_four_bit else box_of(layer.weight)
        self.is_sharded = isinstance(up, DTensor)

    @torch.no_grad()
    def merged_part(self, whole: bool = False) -> Tensor:
        """Return the shard, or the `whole`, of base + scaling · up down, rounded once; all ranks call it, as adapters
        are gathered.
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
    """Return the full tensor, with its adapter merged if it has one; all ranks of a sharded model call this at the same
    time.
    """
    return tensor.merged_part(whole=True) if isinstance(tensor, Adapted) else full_tensor(tensor)

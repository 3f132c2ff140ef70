"""Low-rank adapters (LoRA) by peft: only adapters are trained; the role's weights are base and adapters merged.

training     y = x Wᵀ + α/r · (x Aᵀ) Bᵀ          W frozen, A and B trained
elsewhere    W + α/r · B A                        exports, engines, and copies of this role's weights

The stacked matrices of a mixture's experts have factors for each expert, which ranks shard as the experts:

experts.gate_up_proj           (E, out, in)       W
experts.lora_A.gate_up_proj    (E, r, in)         A     in peft's files (E·r, in)
experts.lora_B.gate_up_proj    (E, out, r)        B     in peft's files (out, r·E)

The frozen weights may be kept in 4 bits (QLoRA) by bitsandbytes, so that only one layer's weight exists in full at a
time. Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".

W (out, in) ─64 at a time─▶ NormalFloat codes, two per byte, and a scale per block
    ─dequantised in each product─▶ x Wᵀ + b
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braidrl.config import LoraConfig
from braidrl.errors import UserError, first_line, suggest
from braidrl.training.compute.expert_forms import prepare_for_adapters, takes_adapters
from braidrl.training.compute.experts import DOWN, SCALING, UP
from braidrl.training.decoders.body import base_of, decoder_of, non_text_modules
from braidrl.weights.boxes import Box
from braidrl.weights.checkpoint_files import HEAD, shapes_in
from braidrl.weights.file import ADAPTER as ADAPTER_WEIGHTS
from braidrl.weights.shards import WeightPart, box_of, full_tensor, local_shard, weight_parts

T = TypeVar("T")
ADAPTER = "adapter"
"""The folder of the adapters in a role's checkpoint, in peft's format."""
NAME = "default"
PREFIX = "base_model.model."
"""The prefix of tensor names in peft's files."""
STACK = re.compile(rf"(?P<module>.+)\.(?P<factor>{DOWN}|{UP})\.(?P<stack>\w+)")
"""Names of factors of stacked matrices."""
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
    """Add adapters to a decoder's layers and to a vision tower, the same for a seed; outputs do not change yet.

    Raises UserError for a target that they lack.
    """
    peft = import_optional("peft", "lora", "lora")
    decoder = decoder_of(model)
    linear = {name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    stacks = stacks_of(decoder)
    for target in lora.targets:
        if target not in linear | stacks.keys():
            raise UserError(
                f"lora.targets: {type(model).__name__} has no linear layer {target!r} in its layers. "
                f"{suggest(target, linear | stacks.keys())}"
            )
    # Hide the model type: otherwise peft also adapts fused experts, which are not linear layers and would not be
    # merged.
    model_type = decoder.config.model_type
    decoder.config.model_type = "decoder"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if lora.linear_targets:
                peft.inject_adapter_in_model(
                    peft_config(lora, of_experts=False, targets=lora.linear_targets), decoder, NAME
                )
            # In the modules' order, in which peft nests their adapters.
            for module, name in (
                stack for target, stacks_of in stacks.items() if target in lora.targets for stack in stacks_of
            ):
                add_to_stack(module, name, lora)
            add_to_tower(model, lora)
    finally:
        decoder.config.model_type = model_type
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)
        parameter.requires_grad_(is_adapter(name))


def with_adapters(model: Any, lora: LoraConfig, seed: int) -> None:
    """Add adapters as `add_adapters`, with the values of the configured file, if any. Raises UserError as these."""
    add_adapters(model, lora, seed)
    if lora.adapter:
        start_from(model, lora.adapter.expanduser() / ADAPTER_WEIGHTS)


def add_to_tower(model: Any, lora: LoraConfig) -> None:
    """Add adapters to linear layers outside a model's text part. Raises UserError for a target that it lacks."""
    parts = [getattr(base_of(model), name) for name in non_text_modules(model)]
    linear = [[name for name, module in part.named_modules() if isinstance(module, nn.Linear)] for part in parts]
    available = {name.rpartition(".")[2] for names in linear for name in names}
    if lacking := [target for target in lora.vision_targets if target not in available]:
        raise UserError(
            f"lora.vision_targets: {type(model).__name__} has no linear layer {lacking[0]!r} in its vision tower. "
            f"{suggest(lacking[0], available)}"
        )
    for part, names in zip(parts, linear, strict=True):
        # By whole names: a convolution of patches may be called as a linear layer is.
        if targets := [name for name in names if name.rpartition(".")[2] in lora.vision_targets]:
            config = peft_config(lora, of_experts=False, targets=targets)
            import_optional("peft", "lora", "lora").inject_adapter_in_model(config, part, NAME)


def stacks_of(model: nn.Module) -> dict[str, list[tuple[Any, str]]]:
    """Return the stacks (E, out, in) of a model's experts by target name, such as `experts.gate_up_proj`: each with its
    module and name.
    """
    stacks: dict[str, list[tuple[Any, str]]] = {}
    for title, module in model.named_modules():
        # Experts of forms that Braid does not know cannot have adapters.
        for name, parameter in module.named_parameters(recurse=False) if takes_adapters(module) else ():
            if parameter.dim() == 3:
                stacks.setdefault(f"{title.rpartition('.')[2]}.{name}", []).append((module, name))
    return stacks


def add_to_stack(module: Any, name: str, lora: LoraConfig) -> None:
    """Add an adapter to stacked matrices of a module of experts, with peft's initial values."""
    prepare_for_adapters(module)
    if not hasattr(module, DOWN):
        setattr(module, DOWN, nn.ParameterDict())
        setattr(module, UP, nn.ParameterDict())
        setattr(module, SCALING, lora.alpha / lora.rank)
    weights = getattr(module, name)
    experts, outer, inner = (weights.mT if is_transposed(module) else weights).shape
    bound = 1 / math.sqrt(inner)
    down = torch.empty(experts, lora.rank, inner, device=weights.device).uniform_(-bound, bound)
    getattr(module, DOWN)[name] = nn.Parameter(down)
    getattr(module, UP)[name] = nn.Parameter(torch.zeros(experts, outer, lora.rank, device=weights.device))


def is_transposed(module: Any) -> bool:
    """Return True for experts whose matrices are (in, out) for peft, which reads this attribute."""
    return bool(getattr(module, "is_transposed", False))


def start_from(model: nn.Module, path: Path) -> None:
    """Copy adapters of a file in peft's format into those of a model.

    Raises UserError if the file cannot be read or is of another model.
    """
    adapters = adapters_of(dict(model.named_parameters()))
    try:
        saved = read_adapters(path, shapes_in(adapters))
    except (OSError, SafetensorError) as error:
        raise UserError(f"lora.adapter: {path} cannot be read ({first_line(error)})") from error
    shapes, saved_shapes = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (adapters, saved)
    )
    if unlike := sorted(name for name in shapes | saved_shapes if shapes.get(name) != saved_shapes.get(name)):
        name = unlike[0]
        raise UserError(
            f"lora.adapter: {path} is of another model: {name} is {saved_shapes.get(name, 'missing')} there, and "
            f"{shapes.get(name, 'missing')} in {type(model).__name__}"
        )
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(saved[name])


def peft_config(
    lora: LoraConfig,
    model: Path | None = None,
    head: bool = False,
    of_experts: bool = True,
    targets: Sequence[str] | None = None,
) -> Any:
    """Return peft's configuration, of all linear layers or of these targets, without `of_experts` of no others; with
    `head`, the scalar head is trained in full.
    """
    return import_optional("peft", "lora", "lora").LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(
            dict.fromkeys((*lora.linear_targets, *lora.vision_targets)) if targets is None else targets
        ),
        target_parameters=list(lora.expert_targets) or None if of_experts else None,
        bias="none",
        base_model_name_or_path=str(model) if model else None,
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=["score"] if head else None,
    )


def adapter_config(lora: LoraConfig) -> str:
    return json.dumps(peft_config(lora).to_dict(), default=sorted)


def is_adapter(name: str) -> bool:
    """Return True if LoRA trains a parameter: an adapter's factor or a scalar head."""
    return ".lora_" in name or name == HEAD


def adapters_of(named: Mapping[str, T]) -> dict[str, T]:
    """Return the parameters that LoRA trains, or their shapes, by peft's names."""
    adapters = {name: value for name, value in named.items() if is_adapter(name)}
    stacks: dict[tuple[str, str], list[str]] = {}
    for match in filter(None, map(STACK.fullmatch, adapters)):
        stacks.setdefault((match["module"], match["factor"]), []).append(match["stack"])
    titles = {name: name.replace(f".{NAME}.", ".") for name in adapters}
    for (module, factor), names in stacks.items():
        for around, name in enumerate(reversed(names)):
            titles[f"{module}.{factor}.{name}"] = f"{module}{'.base_layer' * around}.{factor}.weight"
    return {PREFIX + titles[name]: value for name, value in adapters.items()}


def read_adapters(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors of a file in peft's format, factors of stacked matrices in the model's `shapes`."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        shape = shapes.get(name, tensor.shape)
        if len(shape) == 3 and tensor.dim() == 2 and tensor.numel() == shape.numel():
            is_up = f".{UP}." in name
            experts, *sizes = shape
            tensors[name] = tensor.view(*sizes, experts).movedim(-1, 0) if is_up else tensor.view(shape)
    return tensors


class StackFactor:
    """A factor of stacked matrices in the form of peft's files, made on demand."""

    def __init__(self, factor: Tensor, is_up: bool) -> None:
        self.factor, self.is_up, self.dtype, self.device = factor, is_up, factor.dtype, factor.device
        experts, outer, inner = factor.shape
        self.shape = torch.Size((outer, inner * experts) if is_up else (experts * outer, inner))
        self.box, self.is_sharded = Box.whole(self.shape), isinstance(factor, DTensor)

    def merged_part(self, box: Box | None = None) -> Tensor:
        """Return the factor, or a block of it; all ranks that shard it call this at the same time."""
        full = full_tensor(self.factor)
        return (box or self.box).of((full.movedim(0, -1) if self.is_up else full).reshape(self.shape))


def adapter_parts(model: nn.Module) -> dict[str, WeightPart]:
    """Return this rank's parts of the parameters that LoRA trains, by peft's names and in the form of its files."""
    return weight_parts(
        {
            name: StackFactor(tensor, f".{UP}." in name) if tensor.dim() == 3 else tensor
            for name, tensor in adapters_of(dict(model.named_parameters())).items()
        }
    )


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

    def merged_part(self, box: Box | None = None) -> Tensor:
        """Return a block of this rank's shard, by default all of it; all ranks call this together."""
        box = box or self.box
        return self._merged(box.of(local_shard(self.layer.weight), self.box), box)

    def merged(self) -> Tensor:
        """Return the full weight; all ranks call it."""
        return self._merged(full_tensor(self.layer.weight), Box.whole(self.shape))

    @torch.no_grad()
    def _merged(self, base: Tensor, box: Box) -> Tensor:
        """Return a block of base + scaling · up down, rounded once."""
        rows, columns = box.slices
        up, down = full_tensor(self.up)[rows], full_tensor(self.down)[:, columns]
        dtype = torch.promote_types(base.dtype, torch.float32)
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype), alpha=self.scaling).to(base.dtype)


class AdaptedStack:
    """The stacked matrices (E, out, in) of experts with their adapter, which ranks shard by experts alike."""

    is_sharded = False
    """A rank has the factors of its experts, and merges without communication."""

    def __init__(self, module: Any, name: str) -> None:
        self.weights, self.scaling, self.is_transposed = (
            getattr(module, name),
            getattr(module, SCALING),
            is_transposed(module),
        )
        self.down, self.up = getattr(module, DOWN)[name], getattr(module, UP)[name]
        self.shape, self.dtype, self.device = self.weights.shape, self.weights.dtype, self.weights.device
        self.box = box_of(self.weights)

    def merged_part(self, box: Box | None = None) -> Tensor:
        """Return a block of this rank's shard, by default all of it."""
        box = box or self.box
        of_experts = [
            Box((box.offsets[0], 0, 0), (box.sizes[0], *factor.shape[1:])).of(local_shard(factor), box_of(factor))
            for factor in (self.down, self.up)
        ]
        return self._merged(box.of(local_shard(self.weights), self.box), of_experts[0], of_experts[1], box)

    def merged(self) -> Tensor:
        """Return the full stack; all ranks that shard it call this at the same time."""
        weights, down, up = map(full_tensor, (self.weights, self.down, self.up))
        return self._merged(weights, down, up, Box.whole(self.shape))

    @torch.no_grad()
    def _merged(self, base: Tensor, down: Tensor, up: Tensor, box: Box) -> Tensor:
        """Return a block of base + scaling · up down, rounded once."""
        first, second = (down.mT, up.mT) if self.is_transposed else (up, down)
        _, rows, columns = box.slices
        dtype = torch.promote_types(base.dtype, torch.float32)
        factors = first[:, rows].to(dtype), second[..., columns].to(dtype)
        return torch.baddbmm(base.to(dtype), *factors, alpha=self.scaling).to(base.dtype)


def plain_names(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor | Adapted | AdaptedStack]:
    """Return a module's tensors by their names without adapters; adapted weights include their adapters."""
    weights: dict[str, Tensor | Adapted | AdaptedStack] = {}
    for name, tensor in named.items():
        layer, _, name_in_layer = name.partition(".base_layer.")
        module, _, leaf = name.rpartition(".")
        if name_in_layer in ("weight", "codes"):
            product: Any = model.get_submodule(layer)
            down, up = product.lora_A[NAME].weight, product.lora_B[NAME].weight
            weights[f"{layer}.weight"] = Adapted(product.base_layer, down, up, float(product.scaling[NAME]))
        elif name_in_layer == "scales":
            continue
        elif name_in_layer:
            weights[f"{layer}.{name_in_layer}"] = tensor
        elif f"{module}.{DOWN}.{leaf}" in named:
            weights[name] = AdaptedStack(model.get_submodule(module), leaf)
        elif ".lora_" not in name:
            weights[name] = tensor
    return weights


def merged(tensor: Tensor | Adapted | AdaptedStack) -> Tensor:
    """Return the full tensor, with its adapter merged if it has one; ranks of a sharded model call this together."""
    return full_tensor(tensor) if isinstance(tensor, Tensor) else tensor.merged()

"""Frozen weights in 4 bits under adapters (QLoRA), by bitsandbytes.

W (out, in) ──64 at a time──▶ NormalFloat codes, two per byte, and a scale per block ──dequantised in each product──▶ x Wᵀ + b

Only one layer's weight exists in full at a time. Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from braidrl.errors import UserError

BLOCK = 64
"""Weights that share a scale."""
KIND = "nf4"
BYTES_PER_WEIGHT = 0.5 + torch.float32.itemsize / BLOCK
# bitsandbytes, which peft also imports, warns about kernels on the model hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def import_bitsandbytes(key: str) -> Any:
    """Import bitsandbytes. Raises UserError, naming the configuration `key` that needs it, if it is not installed."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(f"{key} needs bitsandbytes; install it by `pip install 'braidrl[bits]'`") from error
    return bitsandbytes


class FourBitLinear(nn.Module):
    """A linear layer with a frozen 4-bit weight; only its input gets a gradient."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize a layer's float32 or bfloat16 weight; keep its bias."""
        super().__init__()
        functional = import_bitsandbytes("lora.base_dtype").functional
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


def quantize_adapted(model: nn.Module) -> None:
    """Quantize the weights under a model's adapters to 4 bits, in place."""
    for module in list(model.modules()):
        if isinstance(base := getattr(module, "base_layer", None), nn.Linear):
            module.base_layer = FourBitLinear(base)

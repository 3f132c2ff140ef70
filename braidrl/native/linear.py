"""Matrix products on the CPU by the faster of torch's two libraries, MKL and oneDNN.

For float32 torch calls MKL, which does not use the 512-bit units of other vendors' processors; oneDNN does, and is
twice as fast there. From 16 rows on, both give a row the same bits for any number of rows. AMD's Zen 4 needs two cycles
for 512 bits, so MKL reaches its full rate there: forward products use oneDNN, and a weight's gradient uses MKL.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from braidrl.native.building import address, in_memory, library, processor
from braidrl.native.kernels import accumulate, has_kernels

GRADIENT_ROWS = 512
"""Rows per product in a weight's gradient: oneDNN is slow for a long inner dimension."""


@cache
def prefers_onednn() -> bool:
    """Return True on a CPU with 512-bit units that is not Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    return processor().get("vendor_id", "GenuineIntel") != "GenuineIntel"


@cache
def gradients_by_onednn() -> bool:
    """Return True if oneDNN computes a weight's gradient faster than MKL: where it is preferred, except on Zen 4, AMD's
    family 25.
    """
    return prefers_onednn() and processor().get("cpu family") != "25"


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) @ weight (N, K).T + bias (N,), (..., N). Differentiable."""
    if not prefers_onednn() or not in_memory(x, weight) or not x.dtype == weight.dtype == torch.float32:
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Product.apply(x, weight, bias)
    return onednn(x, weight, bias)


@cache
def has_row_product(dtype: torch.dtype) -> bool:
    """Return True if this processor has `row_product`'s vector units, and none that multiply bfloat16 by themselves."""
    flags = set(processor().get("flags", "").split())
    if "avx2" not in flags or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and flags & {"avx512_bf16", "amx_bf16"}:
        return False
    return library("products", dtype) is not None


@cache
def decodes_by_row_product(dtype: torch.dtype) -> bool:
    """Return True if `row_product` is the faster one for decoding on this processor.

    On AVX2 a float32 product of 1 row takes a fifth of the time of torch's 16, and 16 to 256 rows take as long as
    torch's; bfloat16 products without bfloat16 units take a fifth. With units of 512 bits 1 to 16 rows take a third to
    four fifths, but 128 rows 1.1 to 1.3 times as long, so torch multiplies.
    """
    return has_row_product(dtype) and not (dtype == torch.float32 and "avx512f" in processor().get("flags", "").split())


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (M, K) @ weight (N, K).T + bias (N,), (M, N), without gradients; a row has the same bits for any number
    of rows M, and few rows cost little more than reading the weight. Raises MemoryError.
    """
    dtype = x.dtype
    out = x.new_empty((len(x), len(weight)))
    done = library("products", dtype).product(
        address(x, dtype),
        address(weight, dtype),
        None if bias is None else address(bias, dtype),
        address(out, dtype),
        len(x),
        x.shape[1],
        len(weight),
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError("no memory for the numbers of a product")
    return out


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `product` in float32 without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, weight.shape[0])
        grad_x = onednn(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        found = weight_gradient(rows, x.reshape(-1, weight.shape[1])) if ctx.needs_input_grad[1] else None
        grad_weight = None if found is None else found.contiguous()
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def zero_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of a weight's shape (N, K), in the layout to which `add_weight_gradient` adds fastest.

    For N > K `weight_gradient` returns the transpose of oneDNN's result. A sum in that layout is transposed once at the
    end, not for each part.
    """
    if _by_onednn(weight) and weight.shape[0] > weight.shape[1]:
        return weight.new_zeros(weight.shape[::-1]).t()
    return torch.zeros_like(weight, dtype=dtype)


def weight_gradient(grads: Tensor, x: Tensor) -> Tensor:
    """Return grads (M, N).T @ x (M, K), (N, K), perhaps not contiguous."""
    if not _by_onednn(grads):
        return grads.t() @ x
    # oneDNN copies the first factor, so the narrower one comes first.
    transposes = grads.shape[1] > x.shape[1]
    first, second = (x, grads) if transposes else (grads, x)
    products = (
        onednn(part.t(), other.t())
        for part, other in zip(first.split(GRADIENT_ROWS), second.split(GRADIENT_ROWS), strict=True)
    )
    total = next(products)
    for product_of_part in products:
        total.add_(product_of_part)
    return total.t() if transposes else total


def _by_onednn(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and gradients_by_onednn()


def add_weight_gradient(total: Tensor, grads: Tensor, x: Tensor) -> None:
    """Add grads (M, N).T @ x (M, K) to `total` (N, K), which may be of a higher precision."""
    if total.dtype == torch.float32 != grads.dtype and total.is_contiguous() and has_kernels(grads, total):
        accumulate(total, weight_gradient(grads, x))
    elif total.dtype != grads.dtype or _by_onednn(total):
        total += weight_gradient(grads, x)
    else:
        total.addmm_(grads.t(), x)


class ProductLinear(nn.Linear):
    """A linear layer that multiplies with `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def use_fast_products(model: nn.Module) -> None:
    """Make every plain linear layer of the model multiply with `product`, if that is faster."""
    if prefers_onednn():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = ProductLinear

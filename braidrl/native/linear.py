"""Matrix products on the CPU by the faster of torch's two libraries, MKL and oneDNN.

For float32 torch calls MKL, which does not use the 512-bit units of other vendors' processors; oneDNN does, and is
twice as fast there. From 16 rows on, both give a row the same bits for any number of rows. AMD's Zen 4 needs two cycles
for 512 bits, so MKL reaches its full rate there: forward products use oneDNN, and a weight's gradient uses MKL.
"""

from collections.abc import Sequence
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
    """Return True on a CPU with 512-bit units that is not made by Intel."""
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


def product_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `product` of x (M, K) and weight (N, K), without gradients, to `out` (M, N)."""
    if prefers_onednn() and in_memory(x, weight) and x.dtype == weight.dtype == torch.float32:
        out.copy_(onednn(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@cache
def has_row_product(dtype: torch.dtype) -> bool:
    """Return True if this processor has the vector units of `row_product`, and no units that multiply bfloat16."""
    flags = set(processor().get("flags", "").split())
    if "avx2" not in flags or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and flags & {"avx512_bf16", "amx_bf16"}:
        return False
    return library("products", dtype) is not None


PANEL = 16
"""Rows of a weight in the widest panel of `products.c`."""
PACKED = 1 << 30
"""Bytes of float32 matrices that are packed, at most: reading more of them takes longer than packing on the fly."""


def panels_size(weight: Tensor) -> int:
    """Return the number of elements of a matrix (N, K) padded to whole panels."""
    return -(-weight.shape[-2] // PANEL) * PANEL * weight.shape[-1]


def packed_bytes(weights: Sequence[Tensor]) -> int:
    """Return the bytes of matrices (N, K) or (E, N, K) when packed; 0 if packing on the fly is faster."""
    size = 4 * sum(weight.shape[:-2].numel() * panels_size(weight) for weight in weights)
    return size if size <= PACKED and all(weight.dtype == torch.float32 for weight in weights) else 0


def packed(weight: Tensor) -> Tensor:
    """Return a weight (N, K), or a stack of them (E, N, K), in the order that `row_product` and `gated_experts` read:
    float32, with N rounded up to whole panels, (..., panels).
    """
    panels = torch.empty((*weight.shape[:-2], panels_size(weight)))
    columns, inner = weight.shape[-2:]
    pack = library("products", weight.dtype).pack
    for matrix, part in zip(weight.view(-1, columns, inner), panels.view(-1, panels.shape[-1]), strict=True):
        pack(address(matrix, weight.dtype), address(part, torch.float32), inner, columns, torch.get_num_threads())
    return panels


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, panels: Tensor | None = None) -> Tensor:
    """Return x (M, K) @ weight (N, K).T + bias (N,), (M, N), without gradients.

    A row has the same bits for any number of rows M, and few rows cost little more than reading the weight. Pass
    `panels`, from `packed(weight)`, for a weight that is used often. Raises MemoryError.
    """
    dtype = x.dtype
    rows, inner = x.shape
    out = x.new_empty((rows, weight.shape[0]))
    done = library("products", dtype).product(
        address(x, dtype),
        address(weight, dtype),
        None if panels is None else address(panels, torch.float32),
        None if bias is None else address(bias, dtype),
        address(out, dtype),
        rows,
        inner,
        weight.shape[0],
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError("no memory for the result of a product")
    return out


def chosen_experts(logits: Tensor, active: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the `active` experts with the largest logits (T, E), (T, K) int64, and their weights (T, K), without
    gradients: the softmax over all experts, or with `normalised` over the chosen ones.
    """
    chosen = torch.empty((len(logits), active), dtype=torch.int64)
    weights = logits.new_empty(chosen.shape)
    library("products", logits.dtype).route(
        address(logits, logits.dtype),
        address(chosen, torch.int64),
        address(weights, logits.dtype),
        *logits.shape,
        active,
        normalised,
        torch.get_num_threads(),
    )
    return chosen, weights


def gated_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    panels: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the sums (T, D) over the experts `chosen` (T, K) int64 of each token x (T, D), times `weights` (T, K), of
    down(silu(gate(x)) · up(x)), without gradients.

    The experts are stacks (E, 2 I, D) and (E, D, I); their `panels` are as in `row_product`. A token has the same bits
    among any others. Raises MemoryError.
    """
    dtype, out = x.dtype, torch.empty_like(x)
    done = library("products", dtype).mixture(
        address(x, dtype),
        address(chosen, torch.int64),
        address(weights, dtype),
        address(gate_up, dtype),
        None if panels[0] is None else address(panels[0], torch.float32),
        address(down, dtype),
        None if panels[1] is None else address(panels[1], torch.float32),
        address(out, dtype),
        *chosen.shape,
        *down.shape,
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError("no memory for the results of experts")
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
        of_weight = weight_gradient(rows, x.reshape(-1, weight.shape[1])) if ctx.needs_input_grad[1] else None
        grad_weight = None if of_weight is None else of_weight.contiguous()
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
    """Return grads (M, N).T @ x (M, K), (N, K), possibly non-contiguous."""
    if not _by_onednn(grads):
        return grads.t() @ x
    # oneDNN copies the first factor, so the narrower one comes first.
    transposes = grads.shape[1] > x.shape[1]
    first, second = (x, grads) if transposes else (grads, x)
    products = (
        onednn(part.t(), columns.t())
        for part, columns in zip(first.split(GRADIENT_ROWS), second.split(GRADIENT_ROWS), strict=True)
    )
    total = next(products)
    for product_of_part in products:
        total.add_(product_of_part)
    return total.t() if transposes else total


def weight_gradient_into(out: Tensor, grads: Tensor, x: Tensor) -> None:
    """Write `weight_gradient` to `out` (N, K)."""
    if _by_onednn(grads):
        out.copy_(weight_gradient(grads, x))
    else:
        torch.mm(grads.t(), x, out=out)


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

"""The parts of a decode step on CUDA that are not matrix products, as Triton kernels: four launches a layer.

add_norm ─▶ q k v product ─▶ attend: norms, rotation, both writes, attention ─▶ o product
    ─▶ add_norm ─▶ gate up product ─▶ gated ─▶ down product

They compute what `decode.c` computes: in float32, each row by itself. Attention reads the keys of a row's slot up to
its position and no further.

Shapes: B rows, W width, H query heads, K key heads, D head width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]
    residual, update, weight, out, width, epsilon, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_UPDATE:
        x += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, x, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (factors * (x * scale)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(both + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    projected,
    query_weight,
    key_weight,
    cosine,
    sine,
    slots,
    positions,
    keys,
    values,
    out,
    epsilon,
    scaling,
    capacity,
    window,
    key_heads,
    HAS_NORMS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A head is two halves, which a rotation mixes. GROUPS is GROUP rounded up to a power of two.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    group = tl.arange(0, GROUPS)
    position = tl.load(positions + row)
    cosine1 = tl.load(cosine + 2 * row * HALF + half)
    cosine2 = tl.load(cosine + (2 * row + 1) * HALF + half)
    sine1 = tl.load(sine + 2 * row * HALF + half)
    sine2 = tl.load(sine + (2 * row + 1) * HALF + half)

    of_row = projected + row * (GROUP + 2) * key_heads * 2 * HALF
    at_query = of_row + (head * GROUP + group[:, None]) * 2 * HALF + half[None, :]
    in_group = group[:, None] < GROUP
    query1 = tl.load(at_query, mask=in_group, other=0.0).to(tl.float32)
    query2 = tl.load(at_query + HALF, mask=in_group, other=0.0).to(tl.float32)
    at_key = of_row + (GROUP * key_heads + head) * 2 * HALF + half
    key1 = tl.load(at_key).to(tl.float32)
    key2 = tl.load(at_key + HALF).to(tl.float32)
    if HAS_NORMS:
        square = (tl.sum(query1 * query1, 1) + tl.sum(query2 * query2, 1)) / (2 * HALF)
        scale = 1.0 / tl.sqrt(square + epsilon)
        query1 *= scale[:, None] * tl.load(query_weight + half).to(tl.float32)[None, :]
        query2 *= scale[:, None] * tl.load(query_weight + HALF + half).to(tl.float32)[None, :]
        key_scale = 1.0 / tl.sqrt((tl.sum(key1 * key1, 0) + tl.sum(key2 * key2, 0)) / (2 * HALF) + epsilon)
        key1 *= key_scale * tl.load(key_weight + half).to(tl.float32)
        key2 *= key_scale * tl.load(key_weight + HALF + half).to(tl.float32)
    turned1 = (query1 * cosine1[None, :] - query2 * sine1[None, :]) * scaling
    turned2 = (query2 * cosine2[None, :] + query1 * sine2[None, :]) * scaling
    new_key1 = (key1 * cosine1 - key2 * sine1).to(keys.dtype.element_ty)
    new_key2 = (key2 * cosine2 + key1 * sine2).to(keys.dtype.element_ty)
    at_value = at_key + key_heads * 2 * HALF
    new_value1 = tl.load(at_value)
    new_value2 = tl.load(at_value + HALF)

    of_head = (tl.load(slots + row) * key_heads + head) * capacity * 2 * HALF
    at_new = of_head + position * 2 * HALF + half
    tl.store(keys + at_new, new_key1)
    tl.store(keys + at_new + HALF, new_key2)
    tl.store(values + at_new, new_value1)
    tl.store(values + at_new + HALF, new_value2)

    # The new key comes from registers: another thread of this program may not see it in memory yet.
    products = turned1 * new_key1.to(tl.float32)[None, :] + turned2 * new_key2.to(tl.float32)[None, :]
    largest = tl.sum(products, 1)
    total = largest * 0.0 + 1.0
    sums1 = turned1 * 0.0 + new_value1.to(tl.float32)[None, :]
    sums2 = turned2 * 0.0 + new_value2.to(tl.float32)[None, :]
    first = position * 0
    if window > 0:
        first = tl.maximum(position - window + 1, first)
    for start in range(first, position, BLOCK):
        read = start + tl.arange(0, BLOCK)
        is_read = read < position
        at = of_head + read[:, None] * 2 * HALF + half[None, :]
        block1 = tl.load(keys + at, mask=is_read[:, None], other=0.0).to(tl.float32)
        block2 = tl.load(keys + at + HALF, mask=is_read[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(turned1[:, None, :] * block1[None, :, :] + turned2[:, None, :] * block2[None, :, :], 2)
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        kept = tl.exp(largest - most)
        weights = tl.exp(scores - most[:, None])
        total = total * kept + tl.sum(weights, 1)
        block1 = tl.load(values + at, mask=is_read[:, None], other=0.0).to(tl.float32)
        block2 = tl.load(values + at + HALF, mask=is_read[:, None], other=0.0).to(tl.float32)
        sums1 = sums1 * kept[:, None] + tl.sum(weights[:, :, None] * block1[None, :, :], 1)
        sums2 = sums2 * kept[:, None] + tl.sum(weights[:, :, None] * block2[None, :, :], 1)
        largest = most
    at_out = out + (row * key_heads * GROUP + head * GROUP + group[:, None]) * 2 * HALF + half[None, :]
    tl.store(at_out, (sums1 / total[:, None]).to(out.dtype.element_ty), mask=in_group)
    tl.store(at_out + HALF, (sums2 / total[:, None]).to(out.dtype.element_ty), mask=in_group)


ELEMENTS = 1 << 14
"""Products of queries and keys that one program holds at once."""


class CudaKernels:
    """Triton kernels for any head width that is a power of two."""

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Add `update` (B, W) to `residual` (B, W) float32 in place, and return its RMS norm times `weight` (W,), (B,
        W).
        """
        rows, width = residual.shape
        out = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
        block = triton.next_power_of_2(width)
        given = residual if update is None else update
        add_norm_kernel[(rows,)](residual, given, weight, out, width, epsilon, update is not None, block)
        return out

    def gated(self, both: Tensor) -> Tensor:
        """Return silu(first half) · second half of `both` (B, 2W), (B, W)."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        block = min(1024, triton.next_power_of_2(width))
        gated_kernel[(rows, triton.cdiv(width, block))](both, out, width, block)
        return out

    def attend(
        self,
        projected: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        epsilon: float,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor:
        """Attend with one new token of each of B slots, given its projections; see `Kernels.attend`."""
        rows, (_, key_heads, capacity, width) = projected.shape[0], keys.shape
        group = projected.shape[1] // (key_heads * width) - 2
        groups = triton.next_power_of_2(group)
        out = projected.new_empty(rows, group * key_heads * width)
        weights: tuple[Any, Any] = norms or (projected, projected)
        block = max(16, min(64, ELEMENTS // (groups * width)))
        attend_kernel[(rows, key_heads)](
            projected,
            *weights,
            *angles,
            slots,
            positions,
            keys,
            values,
            out,
            epsilon,
            scaling,
            capacity,
            window or 0,
            key_heads,
            norms is not None,
            group,
            groups,
            width // 2,
            block,
        )
        return out

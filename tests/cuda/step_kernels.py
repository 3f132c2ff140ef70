"""Plain torch for the kernels of a decode step on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return heads (B, H, D), rotated by the cosines and sines (B, D) of angles."""
    first, second = x.chunk(2, -1)
    return x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]


class PlainKernels:
    """Computes what `CudaKernels` does by operations of torch."""

    def add_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        if update is not None:
            residual += update.float()
        return rms(residual, weight, epsilon).to(weight.dtype)

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.float().chunk(2, -1)
        return (silu(gate) * up).to(both.dtype)

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
        _, heads, capacity, width = keys.shape
        query, key, value = (
            part.unflatten(1, (-1, width)).float()
            for part in projected.split([projected.shape[1] - 2 * heads * width, heads * width, heads * width], 1)
        )
        if norms is not None:
            query, key = rms(query, norms[0], epsilon), rms(key, norms[1], epsilon)
        query, key = turned(query, *angles) * scaling, turned(key, *angles)
        keys[slots, :, positions], values[slots, :, positions] = key.to(keys.dtype), value.to(values.dtype)
        at = torch.arange(capacity, device=keys.device)
        seen = at <= positions[:, None]
        if window:
            seen &= at > positions[:, None] - window
        grouped = query.unflatten(1, (heads, -1))
        scores = grouped @ keys[slots].float().transpose(-1, -2)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        return (weights @ values[slots].float()).flatten(1).to(projected.dtype)

"""Attention of packed sequences as plain products, for the CPU shadows of tensors that CUDA's kernel would receive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _probabilities(query: Tensor, key: Tensor, scale: float, window: list[int]) -> Tensor:
    """Return probabilities (H, L, L) of queries and keys (H, L, D)."""
    length = query.shape[1]
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0) & ((back <= window[0]) if window[0] >= 0 else (back >= 0))
    return (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)


def _sequences(offsets: Tensor, *packed: Tensor) -> list[tuple[slice, list[Tensor]]]:
    """Split (N, heads, D) into (heads, L, D) of each sequence, in float32."""
    places = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return [(own, [states[own].transpose(0, 1).float() for states in packed]) for own in places]


def varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    _: Any,
    __: int,
    ___: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: list[int] | None = None,
    enable_gqa: bool = False,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `torch_attn::_varlen_attn`."""
    assert offsets.dtype == torch.int32
    group = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for own, (q, k, v) in _sequences(offsets, query, key, value):
        p = _probabilities(q, k.repeat_interleave(group, 0), scale or q.shape[-1] ** -0.5, window or [-1, -1])
        output[own] = (p @ v.repeat_interleave(group, 0)).transpose(0, 1).to(output.dtype)
    log_sums = torch.zeros(query.shape[1], query.shape[0])
    return output, log_sums, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    _: Tensor,
    offsets: Tensor,
    __: Any,
    ___: int,
    ____: int,
    is_causal: bool,
    rng: Tensor,
    scale: float | None = None,
    window: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `torch_attn::_varlen_attn_backward`."""
    group, made = query.shape[1] // key.shape[1], [torch.empty_like(states) for states in (query, key, value)]
    for own, (g, q, k, v, o) in _sequences(offsets, grad, query, key, value, output):
        factor = scale or q.shape[-1] ** -0.5
        keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        p = _probabilities(q, keys, factor, window or [-1, -1])
        scores = p * (g @ values.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * factor
        of_keys, of_values = (
            (s.transpose(-1, -2) @ x).unflatten(0, (-1, group)).sum(1) for s, x in ((scores, q), (p, g))
        )
        for target, result in zip(made, (scores @ keys, of_keys, of_values), strict=True):
            target[own] = result.transpose(0, 1).to(target.dtype)
    return made[0], made[1], made[2]

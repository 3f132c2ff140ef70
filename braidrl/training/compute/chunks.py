"""Fused kernels for the log-probs of a chunk of tokens and for their gradient, which read logits without copying them.

logits_CV, from the output layer ──▶ log_prob_C, log_sum_C, entropy_C
                                 ──▶ gradient_CV

Kernels are made by torch.compile on CUDA and are compiled C on a CPU. Without kernels, `log_probs` computes the same with separate
operations.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from braidrl.native.chunk_kernels import gradient, has_kernels, statistics

Statistics = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


class ChunkKernels(NamedTuple):
    """The kernels of log-probs."""

    statistics: Statistics
    gradient: Callable[..., Tensor]


def chunk_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs at the targets (C,), log Σ exp of the logits over temperature, and the entropies, in float32.

    Args:
        logits: (C, V), not divided by the temperature.
        targets: (C,) int64.
        temperature: Divides the logits.
    """
    scaled = logits.float() / temperature
    log_sum = scaled.logsumexp(-1)
    log_softmax = scaled - log_sum[:, None]
    at_target = scaled.gather(-1, targets[:, None]).squeeze(-1)
    return at_target - log_sum, log_sum, -(log_softmax.exp() * log_softmax).sum(-1)


def chunk_gradient(
    logits: Tensor, targets: Tensor, temperature: float, log_sum: Tensor, entropy: Tensor, grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient with respect to the logits, (C, V) in their dtype.

    d log p_y / dz = 1[y] − p;   d H / dz = −p (log p + H);   z = logits / temperature
    """
    log_softmax = logits.float() / temperature - log_sum[:, None]
    probs = log_softmax.exp()
    grad = -grad_log_prob[:, None] * probs
    if grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * probs * (log_softmax + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    grad = torch.where(is_target, grad + grad_log_prob[:, None], grad)
    return (grad / temperature).to(logits.dtype)


@cache
def compiled_chunks() -> ChunkKernels:
    """Return both functions under torch.compile, for chunks of any length."""
    made: list[Any] = [torch.compile(function, dynamic=True) for function in (chunk_statistics, chunk_gradient)]
    return ChunkKernels(*made)


def chunk_kernels(weight: Tensor, wanted: bool) -> ChunkKernels | None:
    """Return the kernels for a plain output layer in at most float32; None if not wanted or not available."""
    if not wanted or weight.dtype == torch.float64:
        return None
    if weight.is_cuda:
        return compiled_chunks() if has_triton() else None
    return ChunkKernels(statistics, gradient) if has_kernels(weight) else None

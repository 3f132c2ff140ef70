"""Log-probabilities and entropy of given tokens from hidden states, a chunk of tokens at a time.

hidden_ND ──chunk──▶ logits_CV ──▶ log_prob_C, entropy_C        C tokens at once; (N, V) never exists whole
                        ▲
backward: computed again, turned into its own gradient in place, and folded into hidden and weight

N action tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32, whatever the vocabulary."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy_grad: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log_softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    hidden (N, D), weight (V, D), targets (N,) int64; both results (N,) in float32, or float64 for float64 weights.
    The entropy carries a gradient only when asked: it costs one more pass over the logits in the backward.
    """
    parts = chunks(len(hidden), len(weight), chunk_elements)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, temperature, with_entropy_grad, parts)
    return log_probs, entropy if with_entropy_grad else entropy.detach()


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy_grad: bool,
        parts: list[slice],
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = hidden.new_empty(len(hidden), dtype=dtype)
        log_sums = hidden.new_empty(len(hidden), dtype=dtype)
        for part in parts:
            logits = scaled_logits(hidden[part], weight, temperature, dtype)
            log_sums[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - log_sums[part]
            logits.sub_(log_sums[part, None])
            entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.with_entropy_grad, ctx.dtype, ctx.parts = temperature, with_entropy_grad, dtype, parts
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=ctx.dtype) if ctx.needs_input_grad[1] else None
        for part in ctx.parts:
            logits = scaled_logits(hidden[part], weight, ctx.temperature, ctx.dtype).sub_(log_sums[part, None])
            grad = logits_grad(
                logits, targets[part], grads[0][part], grads[1][part] if ctx.with_entropy_grad else None, entropy[part]
            )
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                else:
                    grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 4


def logits_grad(
    log_softmax: Tensor, targets: Tensor, grad_log_prob: Tensor, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient with respect to scaled logits (C, V), written over `log_softmax`.

    d log p_y / dz = 1[y] − p;   d H / dz = −p (log p + H)
    """
    if grad_entropy is None:
        grad = log_softmax.exp_().mul_(-grad_log_prob[:, None])
    else:
        probs = log_softmax.exp()
        factor = log_softmax.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_prob[:, None])
        grad = factor.mul_(probs)
    return grad.scatter_add_(-1, targets[:, None], grad_log_prob[:, None])


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """A new (C, V) tensor of logits over temperature in `dtype`."""
    logits = (hidden @ weight.T).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


def chunks(tokens: int, vocabulary: int, elements: int) -> list[slice]:
    """Slices of the tokens whose logits fit in so many elements, of at least 16 tokens."""
    size = max(16, elements // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

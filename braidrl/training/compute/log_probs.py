"""Log-probs and entropy of given tokens from hidden states, one chunk of tokens at a time.

hidden_ND ──chunk──▶ logits_CV ──▶ log_prob_C, entropy_C        C tokens at once; the (N, V) logits never exist in full
                        ▲
backward: logits are recomputed, overwritten by their gradient, and folded into the gradients of hidden and weight

N action tokens, D model width, V vocabulary. With a sharded vocabulary, V is this rank's shard, and global quantities (the sum of
exponentials, the target's logit, the entropy) are reduced over the ranks.

Fused kernels read the logits of a chunk without copying them: made by torch.compile on CUDA, compiled C on a CPU. Without kernels,
separate operations compute the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._triton import has_triton

from braidrl.native.kernels import gradient, has_kernels, statistics
from braidrl.native.linear import add_weight_gradient, product, zero_gradient

Statistics = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


class ChunkKernels(NamedTuple):
    """The kernels of log-probs."""

    statistics: Statistics
    gradient: Callable[..., Tensor]


def chunk_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs at the targets (C,), log Σ exp of the logits (C, V) over temperature, and the entropies, in float32."""
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


compile_once: Callable[[Any], Any] = cache(partial(torch.compile, dynamic=True))
"""Compiles a function once, for chunks of any length."""


def chunk_kernels(weight: Tensor, wanted: bool) -> ChunkKernels | None:
    """Return the kernels for a plain output layer in at most float32; None if not wanted or not available."""
    if not wanted or weight.dtype == torch.float64:
        return None
    if weight.is_cuda:
        return ChunkKernels(compile_once(chunk_statistics), compile_once(chunk_gradient)) if has_triton() else None
    return ChunkKernels(statistics, gradient) if has_kernels(weight) else None


CHUNK_BYTES = 64 << 20
"""Bytes of logits held at once, for any vocabulary."""


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy_grad: bool = False,
    chunk_elements: int | None = None, compiled: bool = False, cap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log_softmax(logits / temperature) at `targets`, and the entropy of that distribution; logits are hidden @ weight.T.

    Args:
        hidden: (N, D).
        weight: The output layer's weight, (V, D); may be a DTensor sharded by rows.
        targets: (N,) int64 token ids.
        temperature: Divides the logits.
        with_entropy_grad: Let the entropy carry a gradient, at the cost of one more pass over the logits in the backward.
        chunk_elements: Logits held at once; None for CHUNK_BYTES.
        compiled: Use compiled kernels, if there are any for the weight's device.
        cap: Soft cap: logits over temperature z become cap · tanh(z / cap).

    Returns:
        Log-probs and entropy in nats, (N,) float32 each, or float64 for float64 weights.
    """
    vocabulary = Vocabulary()
    if isinstance(weight, DTensor):
        _, (start, _) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        vocabulary, weight = Vocabulary(start, weight.device_mesh.get_group()), weight.to_local()
    kernels = chunk_kernels(weight, compiled and vocabulary.group is None and cap is None)
    if chunk_elements is None:
        held = weight.dtype if kernels else torch.promote_types(weight.dtype, torch.float32)
        chunk_elements = CHUNK_BYTES // held.itemsize
    parts = chunks(len(hidden), len(weight), chunk_elements)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, targets, temperature, with_entropy_grad, parts, vocabulary, kernels, cap
    )
    return log_probs, entropy if with_entropy_grad else entropy.detach()


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy_grad: bool,
        parts: list[slice], vocabulary: "Vocabulary", kernels: ChunkKernels | None, cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = hidden.new_empty(len(hidden), dtype=dtype)
        log_sums = hidden.new_empty(len(hidden), dtype=dtype)
        ctx.kernels = kernels
        for part in parts:
            if kernels is not None:
                found = kernels.statistics(product(hidden[part], weight), targets[part], temperature)
                log_probs[part], log_sums[part], entropy[part] = found
                continue
            logits = scaled_logits(hidden[part], weight, temperature, dtype, cap)
            log_sum = logits.logsumexp(-1)
            if vocabulary.group is not None:
                shards = [torch.empty_like(log_sum) for _ in range(vocabulary.group.size())]
                dist.all_gather(shards, log_sum, group=vocabulary.group)
                log_sum = torch.stack(shards).logsumexp(0)
            log_sums[part] = log_sum
            columns, here = vocabulary.columns(targets[part], logits)
            at_target = logits.gather(-1, columns[:, None]).squeeze(-1)
            log_probs[part] = (at_target if here is None else vocabulary.sum(at_target * here)) - log_sums[part]
            logits.sub_(log_sums[part, None])
            entropy[part] = vocabulary.sum(-(logits.exp() * logits).sum(-1))
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.with_entropy_grad, ctx.dtype, ctx.parts = temperature, with_entropy_grad, dtype, parts
        ctx.cap = cap
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = zero_gradient(weight, ctx.dtype) if ctx.needs_input_grad[1] else None
        for part in ctx.parts:
            grad_entropy = grads[1][part] if ctx.with_entropy_grad else None
            if ctx.kernels is not None:
                grad = ctx.kernels.gradient(
                    product(hidden[part], weight), targets[part], ctx.temperature, log_sums[part], entropy[part],
                    grads[0][part], grad_entropy,
                )  # fmt: skip
            else:
                logits = scaled_logits(hidden[part], weight, ctx.temperature, ctx.dtype, ctx.cap)
                slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square_()
                logits.sub_(log_sums[part, None])
                columns, here = ctx.vocabulary.columns(targets[part], logits)
                at_target = grads[0][part] if here is None else grads[0][part] * here
                # The gradient with respect to scaled logits, as in `chunk_gradient`, written over the log-softmax.
                if grad_entropy is None:
                    grad = logits.exp_().mul_(-grads[0][part, None])
                else:
                    probs = logits.exp()
                    factor = logits.add_(entropy[part, None]).mul_(-grad_entropy[:, None])
                    grad = factor.sub_(grads[0][part, None]).mul_(probs)
                grad = grad.scatter_add_(-1, columns[:, None], at_target[:, None])
                grad = grad if slope is None else grad.mul_(slope)
                grad = grad.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[part] = product(grad, weight.T)
            if grad_weight is not None:
                add_weight_gradient(grad_weight, grad, hidden[part])
        grad_hidden = ctx.vocabulary.sum(grad_hidden)
        whole = None if grad_weight is None else grad_weight.to(weight.dtype).contiguous()
        return grad_hidden, whole, *[None] * 7


@dataclass(frozen=True)
class Vocabulary:
    """This rank's shard of the vocabulary, from entry `start`; the whole vocabulary without a group."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce a tensor in place and return it."""
        if self.group is not None:
            dist.all_reduce(part, group=self.group)
        return part

    def columns(self, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets' columns (C,) in the local logits (C, V), and a mask of the local ones, None if all are local."""
        if self.group is None:
            return targets, None
        columns = targets - self.start
        here = (columns >= 0) & (columns < logits.shape[1])
        return columns.where(here, 0), here


def scaled_logits(
    hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype, cap: float | None = None
) -> Tensor:
    """Return logits over temperature in `dtype`, (C, V), with an optional soft cap; a new tensor."""
    logits = product(hidden, weight).to(dtype)
    logits = logits if temperature == 1.0 else logits.div_(temperature)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def chunks(tokens: int, vocabulary: int, elements: int) -> list[slice]:
    """Return slices of tokens with at most `elements` logits, but at least 16 tokens each."""
    size = max(16, elements // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

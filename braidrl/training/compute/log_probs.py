"""Log-probs and entropy of given tokens from hidden states, one chunk of tokens at a time.

hidden_ND ──chunk──▶ logits_CV ──▶ log_prob_C, entropy_C        C tokens at once; the (N, V) logits never exist in full
                        ▲
backward: logits are recomputed, overwritten by their gradient, and folded into the gradients of hidden and weight

N action tokens, D model width, V vocabulary. With a sharded vocabulary, V is this rank's shard, and global quantities
(the sum of exponentials, the target's logit, the entropy) are reduced over the ranks.

Fused kernels read the logits of a chunk without copying them: made by torch.compile on CUDA, compiled C on a CPU. Where
there are none, `Vocabulary` computes the same by separate operations.
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


class ChunkKernels(NamedTuple):
    """Fused kernels for `chunk_statistics` and `chunk_gradient`."""

    statistics: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., Tensor]


def chunk_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs at the targets (C,), log Σ exp of logits (C, V) over temperature, entropies, in float32."""
    scaled = logits.float() / temperature
    log_sum = scaled.logsumexp(-1)
    log_softmax = scaled - log_sum[:, None]
    at_target = scaled.gather(-1, targets[:, None]).squeeze(-1)
    return at_target - log_sum, log_sum, -(log_softmax.exp() * log_softmax).sum(-1)


def chunk_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
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


def chunk_kernels(weight: Tensor, allowed: bool) -> ChunkKernels | None:
    """Return the kernels for a plain output layer in at most float32; None if not `allowed` or not available."""
    if not allowed or weight.dtype == torch.float64:
        return None
    if weight.is_cuda:
        return ChunkKernels(compile_once(chunk_statistics), compile_once(chunk_gradient)) if has_triton() else None
    return ChunkKernels(statistics, gradient) if has_kernels(weight) else None


CHUNK_BYTES = 64 << 20
"""Bytes of logits held at once, for any vocabulary."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy_grad: bool = False,
    chunk_elements: int | None = None,
    compiled: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) at `targets`, and the entropy of that distribution; logits are hidden @
    weight.T.

    Args:
        hidden: (N, D).
        weight: The output layer's weight, (V, D); may be a DTensor sharded by rows.
        targets: (N,) int64 token ids.
        temperature: Divides the logits.
        with_entropy_grad: Let the entropy carry a gradient, at the cost of one more pass over the logits in the
            backward.
        chunk_elements: Logits held at once; None for CHUNK_BYTES.
        compiled: Use compiled kernels, if there are any for the weight's device.
        cap: Soft cap: logits over temperature z become cap · tanh(z / cap).

    Returns:
        Log-probs and entropy in nats, (N,) float32 each, or float64 for float64 weights.
    """
    vocabulary = Vocabulary(cap=cap)
    if isinstance(weight, DTensor):
        _, (start, _) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        vocabulary, weight = Vocabulary(start, weight.device_mesh.get_group(), cap), weight.to_local()
    kernels = chunk_kernels(weight, compiled and vocabulary.group is None and cap is None)
    if chunk_elements is None:
        logits_dtype = weight.dtype if kernels else torch.promote_types(weight.dtype, torch.float32)
        chunk_elements = CHUNK_BYTES // logits_dtype.itemsize
    parts = chunks(len(hidden), len(weight), chunk_elements)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, targets, temperature, with_entropy_grad, parts, kernels or vocabulary, vocabulary.group
    )
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
        kernels: "ChunkKernels | Vocabulary",
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_probs, log_sums, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for part in parts:
            of_part = kernels.statistics(product(hidden[part], weight), targets[part], temperature)
            log_probs[part], log_sums[part], entropy[part] = of_part
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.with_entropy_grad, ctx.dtype = temperature, with_entropy_grad, dtype
        ctx.parts, ctx.kernels, ctx.group = parts, kernels, group
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = zero_gradient(weight, ctx.dtype) if ctx.needs_input_grad[1] else None
        for part in ctx.parts:
            grad = ctx.kernels.gradient(
                product(hidden[part], weight),
                targets[part],
                ctx.temperature,
                log_sums[part],
                entropy[part],
                grads[0][part],
                grads[1][part] if ctx.with_entropy_grad else None,
            )
            grad_hidden[part] = product(grad, weight.T)
            if grad_weight is not None:
                add_weight_gradient(grad_weight, grad, hidden[part])
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        weight_gradient = None if grad_weight is None else grad_weight.to(weight.dtype).contiguous()
        return grad_hidden, weight_gradient, *[None] * 6


@dataclass(frozen=True)
class Vocabulary:
    """Log-probs by separate operations in at least float32; with a group over this rank's shard of the vocabulary, from
    entry `start`.
    """

    start: int = 0
    group: dist.ProcessGroup | None = None
    cap: float | None = None
    """Soft cap of logits over temperature."""

    def statistics(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `chunk_statistics` does, over the vocabulary of all ranks."""
        logits = self.scaled(logits, temperature)
        log_sum = logits.logsumexp(-1)
        if self.group is not None:
            shards = [torch.empty_like(log_sum) for _ in range(self.group.size())]
            dist.all_gather(shards, log_sum, group=self.group)
            log_sum = torch.stack(shards).logsumexp(0)
        columns, is_local = self.columns(targets, logits)
        at_target = logits.gather(-1, columns[:, None]).squeeze(-1)
        if is_local is not None:
            at_target = at_target * is_local
            dist.all_reduce(at_target, group=self.group)
        logits.sub_(log_sum[:, None])
        entropy = -(logits.exp() * logits).sum(-1)
        if self.group is not None:
            dist.all_reduce(entropy, group=self.group)
        return at_target - log_sum, log_sum, entropy

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        log_sum: Tensor,
        entropy: Tensor,
        grad_log_prob: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Return what `chunk_gradient` does, for this rank's logits."""
        dtype, logits = logits.dtype, self.scaled(logits, temperature)
        slope = None if self.cap is None else 1 - (logits / self.cap).square_()
        logits.sub_(log_sum[:, None])
        columns, is_local = self.columns(targets, logits)
        at_target = grad_log_prob if is_local is None else grad_log_prob * is_local
        # Written over the log-softmax.
        if grad_entropy is None:
            grad = logits.exp_().mul_(-grad_log_prob[:, None])
        else:
            probs = logits.exp()
            factor = logits.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
            grad = factor.sub_(grad_log_prob[:, None]).mul_(probs)
        grad = grad.scatter_add_(-1, columns[:, None], at_target[:, None])
        grad = grad if slope is None else grad.mul_(slope)
        return grad.div_(temperature).to(dtype)

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        """Return logits over temperature in at least float32, with the soft cap; the input may be overwritten."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if temperature == 1.0 else logits.div_(temperature)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def columns(self, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets' columns (C,) in the local logits (C, V), and a mask of the local, None if all are."""
        if self.group is None:
            return targets, None
        columns = targets - self.start
        is_local = (columns >= 0) & (columns < logits.shape[1])
        return columns.where(is_local, 0), is_local


def chunks(tokens: int, vocabulary: int, elements: int) -> list[slice]:
    """Return slices of tokens with at most `elements` logits, but at least 16 tokens each."""
    size = max(16, elements // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

"""Layers that a CPU computes faster than transformers does: norms and gated activations in C, and the experts of a
mixture.

Norms and gated activations take one pass over memory instead of five to ten. Modules keep transformers' parameters and
names, and compute as before on another device or in another dtype.

Experts sort their tokens, and take one matrix product for each expert over its slice of rows:

tokens (S) ──sort by expert──▶ | rows of expert 0 | rows of expert 1 | ... | ──up, gate, down──▶ weighted sums by token

On CUDA transformers' grouped products do the same in one kernel. On a CPU they loop over MKL's products, which are the
faster ones for the few rows of decoding, and they support no float64. Here each slice goes through `product`, which
also adds the bias.

Shapes: T tokens, K experts of a token, S = T·K rows, E experts.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from braidrl.native.building import address, in_memory, library
from braidrl.native.linear import product
from braidrl.training.compute.attention import COMPILED

EXPERTS = "braid"
"""The name of this implementation of experts in transformers."""
MANY = 32
"""From this many rows per expert on, `product` is faster than grouped products.

With gradients it always takes two thirds of the time.
"""
NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"}
SILU = {"SiLUActivation", "SiLU"}
GATES = {"Qwen2MLP", "Qwen3MLP", "LlamaMLP"}
ATTENTIONS = {"Qwen2Attention", "Qwen3Attention", "LlamaAttention"}
DTYPES = (torch.float32, torch.bfloat16)
PARTS = 16
"""Partial sums of a norm weight's gradient; fixed, so that results do not depend on the number of threads."""


@cache
def derived(kind: Any, forward: Any) -> Any:
    """Return a subclass of `kind` with another forward; the original is `plain_forward`."""
    return type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "plain_forward": kind.forward}
    )


def compile_layers(model: PreTrainedModel) -> None:
    """Switch the norms, gated activations and attention of a CPU model to compiled kernels, if these can be built."""
    if model.dtype not in DTYPES or library("layers", model.dtype) is None:
        return
    for module in model.modules():
        kind: Any = type(module)
        name = kind.__name__
        if name in NORMS:
            module.__class__ = derived(kind, norm_of)
        elif name in GATES and type(module.act_fn).__name__ in SILU:
            module.__class__ = derived(kind, gate_of)
        elif name in ATTENTIONS:
            setattr(module, COMPILED, True)


def norm_of(module: Any, hidden_states: Tensor) -> Tensor:
    dtype, weight = hidden_states.dtype, module.weight
    if not in_memory(hidden_states, weight) or dtype not in DTYPES or dtype != weight.dtype:
        return module.plain_forward(hidden_states)
    return _Norm.apply(hidden_states, weight, module.variance_epsilon)


def gate_of(module: Any, x: Tensor) -> Tensor:
    # Not the attribute `weight`, which a quantised layer decodes at each access.
    weight = next(module.gate_proj.parameters())
    if not in_memory(x, weight) or x.dtype not in DTYPES or x.dtype != weight.dtype:
        return module.plain_forward(x)
    return module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, dtype = x.contiguous(), x.dtype
        out, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        scales = torch.empty(rows)
        library("layers", dtype).norm_forward(
            address(x, dtype),
            address(weight, dtype),
            address(out, dtype),
            address(scales, torch.float32),
            rows,
            x.shape[-1],
            epsilon,
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad, dtype = grads[0].contiguous(), x.dtype
        grad_x, grad_weight = torch.empty_like(x), torch.zeros((PARTS, x.shape[-1]))
        library("layers", dtype).norm_backward(
            address(grad, dtype),
            address(x, dtype),
            address(weight, dtype),
            address(scales, torch.float32),
            address(grad_x, dtype),
            address(grad_weight, torch.float32),
            len(scales),
            x.shape[-1],
            PARTS,
            torch.get_num_threads(),
        )
        return grad_x, grad_weight.sum(0).to(dtype), None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up, dtype = gate.contiguous(), up.contiguous(), gate.dtype
        out = torch.empty_like(gate)
        library("layers", dtype).gate_forward(
            address(gate, dtype), address(up, dtype), address(out, dtype), gate.numel(), torch.get_num_threads()
        )
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad, dtype = grads[0].contiguous(), gate.dtype
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        library("layers", dtype).gate_backward(
            address(grad, dtype),
            address(gate, dtype),
            address(up, dtype),
            address(grad_gate, dtype),
            address(grad_up, dtype),
            gate.numel(),
            torch.get_num_threads(),
        )
        return grad_gate, grad_up


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sums (T, D) of the experts `top_k_index` (T, K) of tokens (T, D); `self` is transformers'
    module.
    """
    many = hidden_states.is_cpu and (torch.is_grad_enabled() or top_k_index.numel() >= MANY * self.num_experts)
    # transformers 5.17 has no such attribute.
    is_sharded = getattr(self, "_is_expert_parallel", False)
    if (not many and hidden_states.dtype is not torch.float64) or hidden_states.is_meta or is_sharded:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if not len(hidden_states):
        return hidden_states
    chosen, each = top_k_index.reshape(-1), top_k_index.shape[-1]
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=self.num_experts).tolist()

    def multiplied(rows: Tensor, name: str) -> Tensor:
        weights = getattr(self, name).unbind()
        biases = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * self.num_experts
        parts = zip(rows.split(counts), weights, biases, strict=True)
        return torch.cat(
            [
                product(part, weight.t() if self.is_transposed else weight, bias)
                for part, weight, bias in parts
                if len(part)
            ]
        )

    states = multiplied(hidden_states[order // each], "gate_up_proj" if self.has_gate else "up_proj")
    states = multiplied(self._apply_gate(states) if self.has_gate else self.act_fn(states), "down_proj")
    weighted = states * top_k_weights.reshape(-1)[order, None]
    summed = weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1)
    return summed.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)

"""Layers that a CPU computes faster than transformers does: norms and gated activations in C.

They take one pass over memory instead of five to ten. Modules keep transformers' parameters and names, and compute as
before on another device or in another dtype. The experts of a mixture are in `experts.py`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from braidrl.native.building import address, in_memory, library
from braidrl.training.compute.attention import COMPILED

NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"}
SILU = {"SiLUActivation", "SiLU"}
GATES = {"Qwen2MLP", "Qwen3MLP", "LlamaMLP"}
ATTENTIONS = {"Qwen2Attention", "Qwen3Attention", "LlamaAttention"}
MIXTURES = {"Qwen3Moe": "Qwen3", "Qwen2Moe": "Qwen2", "Mixtral": "Llama"}
"""Families of mixtures whose norms, gates and attention compute what those of a dense family do."""
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
        # A mixture's class computes as that of the dense family.
        name = kind.__name__
        if (mixture := next((prefix for prefix in MIXTURES if name.startswith(prefix)), None)) is not None:
            name = MIXTURES[mixture] + name.removeprefix(mixture)
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

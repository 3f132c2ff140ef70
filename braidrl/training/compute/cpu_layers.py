"""Compiled CPU kernels for norms and gated activations: one pass over memory instead of five to ten.

Modules keep transformers' parameters and names, and compute as before on another device or in another dtype.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from braidrl.native.building import FLOAT, INT, LONG, NATIVE, POINTER, address, build, in_memory
from braidrl.training.compute.attention import COMPILED

NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"}
GATES = {"Qwen2MLP", "Qwen3MLP", "LlamaMLP"}
ATTENTIONS = {"Qwen2Attention", "Qwen3Attention", "LlamaAttention"}


@cache
def derived(kind: Any, forward: Any) -> Any:
    """Return a subclass of `kind` with another forward; the original is `plain_forward`."""
    return type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "plain_forward": kind.forward}
    )


def is_silu(module: nn.Module) -> bool:
    """Return whether a gated MLP's activation is SiLU."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLUActivation", "SiLU")


SOURCE = NATIVE / "layers.c"
DTYPES = (torch.float32, torch.bfloat16)
ARGUMENTS: dict[str, list[Any]] = {
    "norm_forward": [POINTER] * 4 + [LONG] * 2 + [FLOAT, INT],
    "norm_backward": [POINTER] * 6 + [LONG] * 3 + [INT],
    "gate_forward": [POINTER] * 3 + [LONG, INT],
    "gate_backward": [POINTER] * 5 + [LONG, INT],
}
PARTS = 16
"""Partial sums of a norm weight's gradient; fixed, so that results do not depend on the number of threads."""


def compile_layers(model: PreTrainedModel) -> None:
    """Switch the norms, gated activations and attention of a CPU model to compiled kernels, if these can be built."""
    if model.dtype not in DTYPES or _functions(model.dtype) is None:
        return
    for module in model.modules():
        kind: Any = type(module)
        name = kind.__name__
        if name in NORMS:
            module.__class__ = derived(kind, norm_of)
        elif name in GATES and is_silu(module):
            module.__class__ = derived(kind, gate_of)
        elif name in ATTENTIONS:
            setattr(module, COMPILED, True)


def norm_of(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute an RMS norm's forward, (..., W)."""
    weight = module.weight
    if not _fits(hidden_states, weight):
        return module.plain_forward(hidden_states)
    return _Norm.apply(hidden_states, weight, module.variance_epsilon)


def gate_of(module: Any, x: Tensor) -> Tensor:
    """Compute a gated MLP's forward, (..., W)."""
    if not _fits(x, module.gate_proj.weight):
        return module.plain_forward(x)
    return module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))


def _fits(x: Tensor, weight: Tensor) -> bool:
    return in_memory(x, weight) and x.dtype in DTYPES and x.dtype == weight.dtype


@cache
def _functions(dtype: torch.dtype) -> Any:
    half = {"BFLOAT16": 1} if dtype == torch.bfloat16 else {}
    functions = build(SOURCE, **half)
    for name, types in ARGUMENTS.items() if functions else ():
        getattr(functions, name).argtypes, getattr(functions, name).restype = types, None
    return functions


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, dtype = x.contiguous(), x.dtype
        out, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        scales = torch.empty(rows)
        _functions(dtype).norm_forward(
            address(x, dtype), address(weight, dtype), address(out, dtype), address(scales, torch.float32),
            rows, x.shape[-1], epsilon, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        grad, dtype = grads[0].contiguous(), x.dtype
        grad_x, grad_weight = torch.empty_like(x), torch.zeros((PARTS, x.shape[-1]))
        _functions(dtype).norm_backward(
            address(grad, dtype), address(x, dtype), address(weight, dtype), address(scales, torch.float32),
            address(grad_x, dtype), address(grad_weight, torch.float32),
            len(scales), x.shape[-1], PARTS, torch.get_num_threads(),
        )  # fmt: skip
        return grad_x, grad_weight.sum(0).to(dtype), None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up, dtype = gate.contiguous(), up.contiguous(), gate.dtype
        out = torch.empty_like(gate)
        _functions(dtype).gate_forward(
            address(gate, dtype), address(up, dtype), address(out, dtype), gate.numel(), torch.get_num_threads()
        )
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad, dtype = grads[0].contiguous(), gate.dtype
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _functions(dtype).gate_backward(
            address(grad, dtype), address(gate, dtype), address(up, dtype),
            address(grad_gate, dtype), address(grad_up, dtype), gate.numel(), torch.get_num_threads(),
        )  # fmt: skip
        return grad_gate, grad_up

"""Layers that a CPU computes faster than transformers does: norms, gated activations and rotary embeddings in C.

They take one pass over memory instead of five to ten. Modules keep transformers' parameters and names, and compute as
before on another device or in another dtype. The experts of a mixture are in `experts.py`.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from braidrl.native.building import address, in_memory, library
from braidrl.training.compute.attention import COMPILED

NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"}
SILU = {"SiLUActivation", "SiLU"}
GATES = {"Qwen2MLP", "Qwen3MLP", "LlamaMLP"}
ATTENTIONS = {"Qwen2Attention", "Qwen3Attention", "LlamaAttention"}
MIXTURES = {"Qwen3Moe": "Qwen3", "Qwen2Moe": "Qwen2", "Mixtral": "Llama"}
"""Families of mixtures whose norms, gates and attention compute what those of a dense family do."""
ROTARY = "apply_rotary_pos_emb"
"""The function by which transformers' attention layers rotate queries and keys."""
DTYPES = (torch.float32, torch.bfloat16)
PARTS = 16
"""Partial sums of a norm weight's gradient; fixed, so that results do not depend on the number of threads."""


@cache
def derived(kind: Any, forward: Any, name: str = "forward") -> Any:
    """Return a subclass of `kind` with another forward, or another method `name`; the original is `plain_forward`."""
    methods = {name: forward, "__module__": kind.__module__, f"plain_{name}": getattr(kind, name)}
    return type(kind.__name__, (kind,), methods)


@cache
def rotating(kind: Any, rotate: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """Return the forward method of an attention layer with `rotate` in place of its rotary function, which is passed
    first.
    """
    # A copy of the method with another global; transformers' class stays unchanged.
    plain: Any = inspect.unwrap(kind.forward)
    names = {**plain.__globals__, ROTARY: partial(rotate, plain.__globals__[ROTARY])}
    copied = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return copied


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
            module.__class__ = derived(kind, rotating(kind, rotate))
        elif getattr(kind, "_apply_gate", None) is _default_apply_gate and type(module.act_fn).__name__ in SILU:
            module.__class__ = derived(kind, gate_of_experts, "_apply_gate")


def fits(*tensors: Tensor) -> bool:
    """Return True for tensors that the kernels take: in memory, and all of one supported dtype."""
    return in_memory(*tensors) and tensors[0].dtype in DTYPES and len({tensor.dtype for tensor in tensors}) == 1


def norm_of(module: Any, hidden_states: Tensor) -> Tensor:
    if not fits(hidden_states, module.weight):
        return module.plain_forward(hidden_states)
    return _Norm.apply(hidden_states, module.weight, module.variance_epsilon)


def gate_of(module: Any, x: Tensor) -> Tensor:
    # Not the attribute `weight`, which a quantised layer decodes at each access.
    weight = next(module.gate_proj.parameters())
    if not fits(x, weight):
        return module.plain_forward(x)
    return module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))


def gate_of_experts(module: Any, both: Tensor) -> Tensor:
    """Return silu(gate) · up, (S, I), of rows of both, (S, 2 I)."""
    if not fits(both):
        return module.plain__apply_gate(both)
    return _GateOfHalves.apply(both)


def rotate(plain: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries (1, H, N, D) and keys (1, K, N, D) rotated by cosines and sines (1, N, D); `plain` is
    transformers' function.
    """
    if not fits(query, key, cos, sin) or cos.shape != (len(query), *query.shape[2:]):
        both: tuple[Tensor, Tensor] = plain(query, key, cos, sin)
        return both
    return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


class _Rotation(torch.autograd.Function):
    """Vectors (B, H, N, D), which lie in memory by token, rotated by cosines and sines (B, N, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos.contiguous(), sin.contiguous()
        return rotated(x, *ctx.angles, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rotated(grads[0], *ctx.angles, inverse=True), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """Return vectors (B, H, N, D) rotated by cosines and sines (B, N, D), or the gradient of it (`inverse`)."""
    tokens, dtype = x.transpose(1, 2).contiguous(), x.dtype
    out = torch.empty_like(tokens)
    library("layers", dtype).rotate(
        *[address(tensor, dtype) for tensor in (tokens, cos, sin, out)],
        cos.shape[0] * cos.shape[1],
        *tokens.shape[2:],
        inverse,
        torch.get_num_threads(),
    )
    return out.transpose(1, 2)


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
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        gate_forward(address(gate, gate.dtype), address(up, gate.dtype), out, gate.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dtype, to_gate, to_up = gate.dtype, torch.empty_like(gate), torch.empty_like(up)
        pointers = [address(tensor, dtype) for tensor in (gate, up, to_gate, to_up)]
        gate_backward(grads[0].contiguous(), pointers, gate.shape[-1])
        return to_gate, to_up


class _GateOfHalves(torch.autograd.Function):
    """As `_Gate`, of gates and values of up side by side, (..., 2 W)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        out = both.new_empty((*both.shape[:-1], both.shape[-1] // 2))
        gate_forward(*halves(both), out, both.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        to_both = torch.empty_like(both)
        gate_backward(grads[0].contiguous(), [*halves(both), *halves(to_both)], both.shape[-1])
        return to_both


def scaled_gate_gradients(both: Tensor, scales: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales · y, (S, I), for y = silu(gate) · up of rows of both, (S, 2 I); and from the gradient (S, I) of
    that product the gradients of both and of the scales, (S,).
    """
    dtype, to_scales = both.dtype, torch.empty(len(both))
    active, to_both = torch.empty_like(grad), torch.empty_like(both)
    library("layers", dtype).scaled_gate_backward(
        *[address(tensor, dtype) for tensor in (grad, both, scales, active, to_both)],
        address(to_scales, torch.float32),
        *grad.shape,
        torch.get_num_threads(),
    )
    return active, to_both, to_scales


def halves(both: Tensor) -> tuple[int, int]:
    """Return the addresses of the first row's halves."""
    start = address(both, both.dtype)
    return start, start + both.shape[-1] // 2 * both.itemsize


def gate_forward(gate: int, up: int, out: Tensor, stride: int) -> None:
    """Write silu(gate) · up to `out` (..., W), of the gates and values at these addresses, whose rows begin `stride`
    numbers apart.
    """
    width, dtype = out.shape[-1], out.dtype
    sizes = out.numel() // max(width, 1), width, stride, torch.get_num_threads()
    library("layers", dtype).gate_forward(gate, up, address(out, dtype), *sizes)


def gate_backward(grad: Tensor, pointers: Sequence[int], stride: int) -> None:
    """Write the gradients of `gate_forward`, from `grad` (..., W); the pointers are those of gate, up, and of their
    gradients.
    """
    width, dtype = grad.shape[-1], grad.dtype
    sizes = grad.numel() // max(width, 1), width, stride, torch.get_num_threads()
    library("layers", dtype).gate_backward(address(grad, dtype), *pointers, *sizes)

"""Fused norms, gated activations and rotary embeddings on CUDA, with the kernels of `cuda_kernels`.

Modules keep transformers' parameters and names, and compute as before on another device or in float64.
"""

import inspect
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from braidrl.training.compute.cuda_kernels import LayerKernels, layer_kernels
from braidrl.training.compute.swapping import ATTENTIONS, GATES, NORMS, derived, is_silu

NOT_PLAIN = (DTensor, AsyncCollectiveTensor)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROTARY = "apply_rotary_pos_emb"
"""The function by which transformers' attention layers rotate queries and keys."""


def fuse_layers(model: PreTrainedModel) -> None:
    """Switch a model for a CUDA device to fused kernels, if this machine has any."""
    if kernels := layer_kernels():
        use_kernels(model, kernels)


def use_kernels(model: PreTrainedModel, kernels: LayerKernels) -> None:
    """Switch the norms, gated activations and attention layers of a model to these kernels."""
    forwards = forwards_by(kernels)
    for module in model.modules():
        kind: Any = type(module)
        name = kind.__name__
        if name in NORMS:
            module.__class__ = derived(kind, forwards["norm"])
        elif name in GATES and is_silu(module):
            module.__class__ = derived(kind, forwards["gate"])
        elif name in ATTENTIONS:
            module.__class__ = derived(kind, turning(kind, kernels))


@cache
def forwards_by(kernels: LayerKernels) -> dict[str, Any]:
    """Return the forward methods of norms and gated MLPs."""

    def norm(module: Any, hidden_states: Tensor) -> Tensor:
        if not fits(kernels, hidden_states, module.weight):
            return module.plain_forward(hidden_states)
        return kernels.norm(hidden_states, module.weight, module.variance_epsilon)

    def gate(module: Any, x: Tensor) -> Tensor:
        up = module.up_proj(x)
        gated = module.gate_proj(x)
        multiplied = kernels.gate(gated, up) if fits(kernels, gated, up) else module.act_fn(gated) * up
        return module.down_proj(multiplied)

    return {"norm": norm, "gate": gate}


@cache
def turning(kind: Any, kernels: LayerKernels) -> Any:
    """Return a copy of an attention layer's forward that uses another rotary function; transformers' own stays unchanged."""
    plain: Any = inspect.unwrap(kind.forward)
    theirs = plain.__globals__[ROTARY]

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        turn = kernels.rotate if fits(kernels, query, key) and cos.dtype == query.dtype else theirs
        return turn(query, key, cos, sin)

    names = {**plain.__globals__, ROTARY: rotate}
    copied = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return copied


def fits(kernels: LayerKernels, *tensors: Tensor) -> bool:
    """Return whether all are plain tensors on the kernels' device in one supported dtype; not DTensors or pending collectives."""
    plain = all(not isinstance(t, NOT_PLAIN) and t.device.type == kernels.device for t in tensors)
    return plain and tensors[0].dtype in DTYPES and len({tensor.dtype for tensor in tensors}) == 1

"""Fused norms, gated activations and rotary embeddings on CUDA: one pass over memory each instead of five to ten.

liger-kernel is installed ──▶ its Triton kernels
else ──▶ the same functions under torch.compile
no Triton ──▶ plain torch, with a warning in the log

Modules keep transformers' parameters and names, and compute as before on another device or in float64.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from braidrl.training.compute.cpu_layers import ATTENTIONS, GATES, NORMS, SILU, derived, rotating

LIGER = "liger_kernel"
logger = logging.getLogger(__name__)


class LayerKernels(NamedTuple):
    """The kernels of norms, gated activations and attention layers."""

    device: str
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """RMS norm of (..., W), weight (W,) and epsilon."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """silu(gate) * up of two tensors (..., W)."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Rotary embedding of queries (1, H, N, D) and keys (1, K, N, D) by cosines and sines (1, N, D)."""


@cache
def layer_kernels() -> LayerKernels | None:
    """Return the kernels for this machine's CUDA devices, or None for plain torch; log the choice once."""
    if not has_triton():  # both kinds of kernels need it
        logger.warning(
            "no Triton for this device, so torch computes what kernels would: install triton, or write "
            "trainer.compile=false"
        )
        return None
    kind = "liger" if importlib.util.find_spec(LIGER) is not None else "compiled"
    logger.info("norms, gated activations and rotary embeddings by %s", NOTICES[kind])
    return kernels_by(kind)


NOTICES = {"liger": "liger-kernel", "compiled": "torch.compile; `pip install liger-kernel` spares compiling them"}


def kernels_by(kind: str) -> LayerKernels:
    """Return liger-kernel's kernels (`liger`), or the functions below under torch.compile, for any number of tokens
    (`compiled`).
    """
    if kind == "compiled":
        compiled = partial(torch.compile, dynamic=True)
        return LayerKernels("cuda", compiled(rms_norm), compiled(silu_gate), compiled(rotary))
    # Imported here: it is optional and needs Triton.
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return LayerKernels(
        "cuda",
        # Same arithmetic as transformers ("llama"); not in place, as others may read the gradient.
        lambda x, weight, epsilon: LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False, None),
        lambda gate, up: LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0),
        liger_rotary_pos_emb,
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x) * weight, (..., W), as transformers computes it: the mean in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., W)."""
    return nn.functional.silu(gate) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries (1, H, N, D) and keys (1, K, N, D) rotated by their positions (Su et al. 2021, equation 34)."""
    cos, sin = cos[:, None], sin[:, None]
    (q1, q2), (k1, k2) = query.chunk(2, -1), key.chunk(2, -1)
    return query * cos + torch.cat([-q2, q1], -1) * sin, key * cos + torch.cat([-k2, k1], -1) * sin


NOT_PLAIN = (DTensor, AsyncCollectiveTensor)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_kernels(model: PreTrainedModel, kernels: LayerKernels | None = None) -> None:
    """Switch the norms, gated activations and attention layers of a model to these kernels, or this machine's."""
    if (kernels := kernels or layer_kernels()) is None:
        return
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__ in NORMS | ATTENTIONS or (kind.__name__ in GATES and type(module.act_fn).__name__ in SILU):
            module.__class__ = derived(kind, forward_of(kind, kernels))


@cache
def forward_of(kind: Any, kernels: LayerKernels) -> Any:
    """Return the forward method of a norm, gated MLP or attention layer of this class by these kernels."""

    def norm(module: Any, hidden_states: Tensor) -> Tensor:
        if not fits(kernels, hidden_states, module.weight):
            return module.plain_forward(hidden_states)
        return kernels.norm(hidden_states, module.weight, module.variance_epsilon)

    def gate(module: Any, x: Tensor) -> Tensor:
        up = module.up_proj(x)
        gated = module.gate_proj(x)
        multiplied = kernels.gate(gated, up) if fits(kernels, gated, up) else module.act_fn(gated) * up
        return module.down_proj(multiplied)

    def rotate(plain: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        turn = kernels.rotate if fits(kernels, query, key) and cos.dtype == query.dtype else plain
        return turn(query, key, cos, sin)

    if kind.__name__ in ATTENTIONS:
        return rotating(kind, rotate)
    return norm if kind.__name__ in NORMS else gate


def fits(kernels: LayerKernels, *tensors: Tensor) -> bool:
    """Return True if all are plain tensors on the kernels' device in a supported dtype; no DTensors or collectives."""
    plain = all(not isinstance(t, NOT_PLAIN) and t.device.type == kernels.device for t in tensors)
    return plain and tensors[0].dtype in DTYPES and len({tensor.dtype for tensor in tensors}) == 1

"""CUDA kernels between a model's matrix products: one pass over memory each instead of five to ten.

liger-kernel is installed ──▶ its Triton kernels: RMS norm, gated activation, rotary embedding
else ──▶ the same functions under torch.compile
no Triton ──▶ plain torch, with a warning in the log
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

LIGER = "liger_kernel"
logger = logging.getLogger(__name__)


class LayerKernels(NamedTuple):
    """The kernels of norms, gated activations and attention layers."""

    device: str
    """The device type that they run on."""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """RMS norm of (..., W), weight (W,) and epsilon."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """silu(gate) * up of two tensors (..., W)."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Rotary embedding of queries (1, H, N, D) and keys (1, K, N, D) by cosines and sines (1, N, D)."""


def choice(triton: bool, liger: bool) -> Literal["liger", "compiled"] | None:
    """Return the kernels to use; None for torch's own operations.

    Args:
        triton: Whether Triton works here; both kinds need it.
        liger: Whether liger-kernel is installed.
    """
    if not triton:
        return None
    return "liger" if liger else "compiled"


@cache
def layer_kernels() -> LayerKernels | None:
    """Return the kernels for this machine's CUDA devices, or None for plain torch; log the choice once."""
    chosen = choice(has_triton(), importlib.util.find_spec(LIGER) is not None)
    logger.warning(NOTICES[chosen]) if chosen is None else logger.info(NOTICES[chosen])
    return KERNELS[chosen]() if chosen else None


NOTICES = {
    "liger": "norms, gated activations and rotary embeddings by liger-kernel",
    "compiled": "norms, gated activations and rotary embeddings by torch.compile; `pip install liger-kernel` spares compiling them",
    None: "no Triton for this device, so torch computes what kernels would: install triton, or write trainer.compile=false",
}


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
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def compiled_kernels() -> LayerKernels:
    """Return the functions under torch.compile, for any number of tokens."""
    compiled = partial(torch.compile, dynamic=True)
    return LayerKernels("cuda", compiled(rms_norm), compiled(silu_gate), compiled(rotary))


def liger_kernels() -> LayerKernels:
    """Return liger-kernel's kernels."""
    # Imported here: it is optional and needs Triton.
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # Same arithmetic as transformers ("llama"); not in place, as others may read the gradient.
        return tensor(LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False, None))

    def gate(x: Tensor, up: Tensor) -> Tensor:
        return tensor(LigerSiLUMulFunction.apply(x, up, 1.0, 1.0))

    return LayerKernels("cuda", norm, gate, liger_rotary_pos_emb)


def tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


KERNELS: dict[str, Callable[[], LayerKernels]] = {"liger": liger_kernels, "compiled": compiled_kernels}

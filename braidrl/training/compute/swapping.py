"""Which of transformers' modules compute with other kernels, and how they come to do so."""

from functools import cache
from typing import Any

from torch import nn

NORMS = {"Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"}
GATES = {"Qwen2MLP", "Qwen3MLP", "LlamaMLP"}
ATTENTIONS = {"Qwen2Attention", "Qwen3Attention", "LlamaAttention"}


@cache
def derived(kind: Any, forward: Any) -> Any:
    """Return a class like `kind` but for its forward, which finds the other one as `plain_forward`."""
    return type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "plain_forward": kind.forward}
    )


def is_silu(module: nn.Module) -> bool:
    """Return True for a gated MLP whose activation is SiLU."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLUActivation", "SiLU")

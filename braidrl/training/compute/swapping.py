"""The modules of transformers that can use other kernels, and the change of their class."""

from functools import cache
from typing import Any

from torch import nn

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

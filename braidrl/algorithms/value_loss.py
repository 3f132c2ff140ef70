"""The critic's loss."""

import torch
from torch import Tensor

from braidrl.algorithms.aggregation import Metrics
from braidrl.algorithms.registry import Needs, losses


@losses.register(columns={"old_values": "values"}, needs=Needs({"clip": (0, 1e6)}))
def value(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> tuple[Tensor, Metrics]:
    """Return ½·max((V − R)², (clip(V, V_old ± clip) − R)²) per action token, (N,); without `clip` ½·(V − R)².

    PPO as its authors implemented it, arXiv 1707.06347. The metrics include the moments for explained variance.

    Args:
        clip: Largest change of V from V_old.
    """
    loss = (values - returns) ** 2
    clipped = torch.zeros_like(returns)
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        other = (near - returns) ** 2
        clipped = (other > loss).to(returns.dtype)
        loss = torch.maximum(loss, other)
    error = (returns - values).detach()
    return 0.5 * loss, {
        "clip_fraction": clipped,
        "values": values.detach(),
        "returns": returns,
        "returns_squared": returns**2,
        "error": error,
        "error_squared": error**2,
    }

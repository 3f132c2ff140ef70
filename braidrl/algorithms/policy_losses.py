"""Policy losses, per action token and before aggregation.

A loss takes flat action tokens and returns `(loss, metrics)`: the loss of each token (N,) with its gradient, and numbers per token
(N,), detached, to be averaged over tokens; one whose name ends in `_max` is reduced by its maximum. r = π/π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braidrl.algorithms.ratios import ratio
from braidrl.algorithms.registry import losses

Metrics = dict[str, Tensor]


@losses.register()
def clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> tuple[Tensor, Metrics]:
    """−min(r·A, clip(r, 1 − low, 1 + high)·A), and with `dual` c at least c·A where A < 0.

    PPO, arXiv 1707.06347, equation 7; high > low is Clip-Higher, DAPO, arXiv 2503.14476, equation 10 (0.2 and 0.28); dual clip,
    arXiv 1912.09729, equation 5.
    """
    r = ratio(log_probs, old_log_probs)
    loss = clipped_surrogate(r, advantages, low, high)
    metrics = clip_metrics(r.detach(), log_probs.detach(), old_log_probs, advantages, low, high)
    if dual is not None:
        bound = -dual * advantages
        metrics["clip_fraction_dual"] = ((advantages < 0) & (loss > bound)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, metrics


def clipped_surrogate(r: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−min(r·A, clip(r, 1 − low, 1 + high)·A), (N,)."""
    return -torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)


def clip_metrics(
    r: Tensor, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, low: float, high: float
) -> Metrics:
    """Where the clip took the gradient away, how likely the tokens clipped from above are, and KL(π_old, π) by k3."""
    above = ((advantages > 0) & (r > 1 + high)).to(r.dtype)
    below = ((advantages < 0) & (r < 1 - low)).to(r.dtype)
    probability = log_probs.exp() * above
    return {
        "clip_fraction": above + below,
        "clip_fraction_low": below,
        "clip_fraction_high": above,
        "clip_high_probability": probability,
        "clip_high_probability_max": probability,
        "kl_old": r - 1 - (log_probs - old_log_probs),
    }


@losses.register()
def reinforce(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """−A·log π. Williams, "Simple statistical gradient-following algorithms", 1992."""
    return -advantages * log_probs, {}


@losses.register()
def sft(log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """−log π of given tokens: REINFORCE with every advantage 1."""
    return -log_probs, {}


@losses.register()
def ptx(log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """−log π of pre-training text, added to a policy loss. PPO-ptx, InstructGPT, arXiv 2203.02155, equation 2."""
    return sft(log_probs)

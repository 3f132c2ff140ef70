"""Losses that restrain tokens with a high covariance of log-probability and advantage, which cause entropy collapse.

A loss sees one micro-batch, but the covariance is defined over the whole batch. Two stages find these tokens before the
update from sums alone. The result does not depend on how the batch is split or laid out:

    shape.covariance ──covariance──▶ shape.highest_covariance ──high_covariance──▶ actor.update(loss=clip_cov)
"""

import math

from braidrl.algorithms.kl import estimate, ratio
from braidrl.algorithms.policy_losses import CLIP, Metrics, clipped_surrogate, kl_metrics
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, divergences, losses, shapes
from braidrl.deferred import Tensor, torch

# Logarithmic bins between the smallest and the largest covariance: neighbouring bins differ by 0.3%.
SMALLEST, LARGEST, BINS = 1e-6, 1e4, 8192


@losses.register(needs=CLIP)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    high_covariance: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """Return the clipped surrogate without gradient from tokens of high covariance (1 in `high_covariance`).

    Clip-Cov, arXiv 2505.22617.
    """
    r = ratio(log_probs, old_log_probs)
    loss, metrics = clipped_surrogate(r, advantages, low, high, log_probs, old_log_probs)
    return loss * (1 - high_covariance), metrics | {"covariance_fraction": high_covariance}


@losses.register(needs=Needs({"coef": (0, 1e6)}, {"estimator": divergences}))
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    high_covariance: Tensor,
    *,
    coef: float = 1.0,
    estimator: str = "abs",
) -> tuple[Tensor, Metrics]:
    """Return −r·A, plus coef·KL(π_old, π) on tokens of high covariance (1 in `high_covariance`, (N,)).

    KL-Cov, arXiv 2505.22617.
    """
    r = ratio(log_probs, old_log_probs)
    penalty = coef * estimate(estimator, log_probs, old_log_probs) * high_covariance
    return penalty - r * advantages, kl_metrics(log_probs, old_log_probs) | {"covariance_fraction": high_covariance}


def token_pairs(
    rollout_log_probs: Ragged, old_log_probs: Ragged | None, advantage: Tensor | None, advantages: Ragged | None
) -> tuple[Tensor, Tensor]:
    """Return log π_old and A of each action token, (N,) float64 each. Raises ValueError when no advantage is given."""
    log_probs = rollout_log_probs if old_log_probs is None else old_log_probs
    if advantages is not None:
        return log_probs.values.double(), advantages.values.double()
    if advantage is None:
        raise ValueError("covariance needs a stage that writes advantage or advantages before it")
    return log_probs.values.double(), log_probs.spread(advantage).double()


def covariance_sums(
    rollout_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    advantage: Tensor | None = None,
    advantages: Ragged | None = None,
) -> dict[str, Tensor]:
    """Return the sums for the means over the batch."""
    log_probs, of_tokens = token_pairs(rollout_log_probs, old_log_probs, advantage, advantages)
    return {"tokens": torch.ones_like(log_probs).sum(), "log_probs": log_probs.sum(), "advantages": of_tokens.sum()}


@shapes.register(writes=["covariance"], scope="batch", sums=covariance_sums)
def covariance(
    rollout_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    advantage: Tensor | None = None,
    advantages: Ragged | None = None,
    *,
    totals: dict[str, Tensor],
) -> Ragged:
    """Return (log π_old − its mean)·(A − its mean) per action token, means over the batch, at the start of the update.
    arXiv 2505.22617.
    """
    log_probs, of_tokens = token_pairs(rollout_log_probs, old_log_probs, advantage, advantages)
    tokens = totals["tokens"].clamp(min=1)
    product = (log_probs - totals["log_probs"] / tokens) * (of_tokens - totals["advantages"] / tokens)
    return rollout_log_probs.with_values(product.to(rollout_log_probs.values.dtype))


def bins_within(values: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Return the bin of each covariance (N,), int64, 0 for all at or below SMALLEST; and True for those in (low, high),
    (N,) bool.
    """
    edges = torch.logspace(math.log10(SMALLEST), math.log10(LARGEST), BINS, dtype=torch.float64, device=values.device)
    within = torch.ones_like(values, dtype=torch.bool) if low is None else values > low
    return torch.bucketize(values.double(), edges), within if high is None else within & (values < high)


def covariance_histogram(
    covariance: Ragged, *, low: float | None = None, high: float | None = None
) -> dict[str, Tensor]:
    """Count the tokens per bin among those within bounds, and all tokens."""
    bins, within = bins_within(covariance.values, low, high)
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=within.device)
    tokens = torch.ones_like(within, dtype=torch.int64).sum()
    return {"histogram": counts.index_add(0, bins, within.long()), "tokens": tokens}


@shapes.register(
    writes=["high_covariance"],
    scope="batch",
    sums=covariance_histogram,
    needs=Needs({"fraction": (0, 1), "low": (-math.inf, math.inf), "high": (-math.inf, math.inf)}),
)
def highest_covariance(
    covariance: Ragged,
    *,
    fraction: float,
    low: float | None = None,
    high: float | None = None,
    totals: dict[str, Tensor],
) -> Ragged:
    """Return 1 for the `fraction` of the batch's action tokens with the highest covariance, 0 for others.

    arXiv 2505.22617: 2e-4 within (1, 5) for Clip-Cov, 2e-4 to 2e-3 without bounds for KL-Cov. Clip-Cov in the paper
    draws tokens at random; this takes the highest, so that the result is deterministic. It takes at least one token, at
    most one bin (0.3% in value) too many, and none with a covariance of 1e-6 or less.

    Args:
        fraction: Share of the action tokens to choose.
        low: Lower bound: only tokens with a larger covariance are chosen.
        high: Upper bound: only tokens with a smaller covariance are chosen.
    """
    from_top = totals["histogram"].flip(0).cumsum(0).flip(0)
    tokens_to_take = (totals["tokens"] * fraction).clamp(min=1).ceil()
    lowest_bin = (from_top >= tokens_to_take).sum().clamp(min=2) - 1
    bins, within = bins_within(covariance.values, low, high)
    return covariance.with_values(((bins >= lowest_bin) & within).to(covariance.values.dtype))

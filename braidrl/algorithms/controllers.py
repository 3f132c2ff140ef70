"""How a coefficient follows what it controls: the next value from the present one and a mean over the batch."""

from __future__ import annotations


def fixed_kl_coefficient(coefficient: float, kl: float) -> float:
    """Return the coefficient as it is, whatever the mean KL per row."""
    return coefficient


def adaptive_kl_coefficient(
    coefficient: float, kl: float, *, target: float, gain: float = 0.1, limit: float = 0.2
) -> float:
    """β·(1 + gain·e) with the relative error e = (kl − target)/target, held within ±limit.

    arXiv 1909.08593, section 2.2. `kl` is the batch's mean, in the unit of `target`: nats per row in the paper.
    """
    error = max(-limit, min(limit, (kl - target) / target))
    return coefficient * (1 + gain * error)


def safe_rlhf_multiplier(multiplier: float, mean_cost: float, *, threshold: float, learning_rate: float) -> float:
    """λ + learning_rate·(mean cost − threshold), kept ≥ 0: ascent on the constraint. Safe-RLHF, arXiv 2310.12773."""
    return max(0.0, multiplier + learning_rate * (mean_cost - threshold))

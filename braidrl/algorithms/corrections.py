"""Importance weights that correct for the difference between trainer and engine: ρ = π_old (trainer) / π_rollout
(engine).

At level `token` ρ is the ratio of each token, at `sequence` the product over its row, at `geometric` the row's
geometric mean.
"""

from dataclasses import replace

from braidrl.algorithms.aggregation import Metrics
from braidrl.algorithms.kl import Level, ratio_at
from braidrl.algorithms.registry import Needs, corrections
from braidrl.deferred import Tensor

LEVELS = ("token", "sequence", "geometric")
BAND = Needs({"low": (0, 1), "high": (1, 1e6)}, {"level": LEVELS})


@corrections.register(needs=Needs({"cap": (1e-6, 1e6)}, {"level": LEVELS}))
def truncated(
    old_log_probs: Tensor, rollout_log_probs: Tensor, offsets: Tensor, *, level: Level = "token", cap: float = 2.0
) -> tuple[Tensor, Metrics]:
    """Return min(ρ, cap), (N,): truncated importance sampling."""
    rho = ratio_at(level, old_log_probs, rollout_log_probs, offsets)
    return rho.clamp(max=cap), correction_metrics(rho, rho > cap)


@corrections.register(needs=BAND)
def masked(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    offsets: Tensor,
    *,
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """Return ρ where low ≤ ρ ≤ high and 0 elsewhere, (N,): masked importance sampling, IcePop at level `token`."""
    rho = ratio_at(level, old_log_probs, rollout_log_probs, offsets)
    outside = (rho < low) | (rho > high)
    return rho.masked_fill(outside, 0), correction_metrics(rho, outside)


@corrections.register(needs=replace(BAND, choices={"level": LEVELS[1:]}))
def sequence_rejection(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    offsets: Tensor,
    *,
    level: Level = "geometric",
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """Return 1 where low ≤ ρ ≤ high and 0 elsewhere, (N,): rows on which engine and trainer disagree are rejected."""
    rho = ratio_at(level, old_log_probs, rollout_log_probs, offsets)
    outside = (rho < low) | (rho > high)
    return (~outside).to(rho.dtype), correction_metrics(rho, outside)


def correction_metrics(rho: Tensor, changed: Tensor) -> Metrics:
    """Return ρ and ρ² per token, for the effective sample size, and 1 where the correction changed ρ."""
    return {"ratio": rho, "ratio_squared": rho**2, "cut_fraction": changed.to(rho.dtype)}

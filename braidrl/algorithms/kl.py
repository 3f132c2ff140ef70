"""Importance ratios of a token or a whole row, and estimators of KL(π, π_ref) per token, both from log-probs.

With x = log π − log π_ref: k1 = x, k2 = x²/2, k3 = e^(−x) + x − 1, after J. Schulman, "Approximating KL divergence"
(2020). A name with `+` has that value and the gradient of k2, whose expectation under π is the gradient of the
divergence itself.
"""

from collections.abc import Callable
from typing import Literal

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import divergences
from braidrl.deferred import Tensor, torch

Level = Literal["token", "sequence", "geometric"]
# e^20 is above every clip and cap, and far below overflow. Without this limit an infinite ratio times a zero advantage
# gives NaN.
LOG_RATIO_LIMIT = 20.0


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return π/π_old of each token, (N,); log-ratios are clamped to ±20."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_at(level: Level, log_probs: Tensor, old_log_probs: Tensor, offsets: Tensor) -> Tensor:
    """Return π/π_old (N,) of each token, or of its row: the product (`sequence`) or mean (`geometric`).

    Raises ValueError.
    """
    rows = Ragged(log_probs - old_log_probs, offsets)
    if level == "token":
        log_ratio = rows.values
    elif level == "sequence":
        log_ratio = rows.spread(rows.row_sums())
    elif level == "geometric":
        log_ratio = rows.spread(rows.row_means())
    else:
        raise ValueError(f"level must be token, sequence or geometric, got {level!r}")
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@divergences.register()
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return log(π/π_ref), (N,): unbiased, may be negative, and its gradient is 0 in expectation."""
    return log_probs - ref_log_probs


@divergences.register()
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return ½·(log π/π_ref)², (N,): biased in value, unbiased in gradient."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


@divergences.register()
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return π_ref/π − log(π_ref/π) − 1, (N,): unbiased and never negative. GRPO, arXiv 2402.03300, equation 4."""
    inverse = ref_log_probs - log_probs
    return inverse.clamp(max=LOG_RATIO_LIMIT).expm1() - inverse


@divergences.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return |log(π/π_ref)|, (N,)."""
    return (log_probs - ref_log_probs).abs()


def with_k2_gradient(name: str, value_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register `name+`: the value of `value_of` and the gradient of k2."""

    def estimator(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        carrier = k2(log_probs, ref_log_probs)
        return value_of(log_probs, ref_log_probs).detach() + carrier - carrier.detach()

    estimator.__doc__ = f"Return the value of `{name}` with the gradient of `k2`, (N,)."
    divergences.register(f"{name}+")(estimator)


for _name in ("k1", "k2", "k3", "abs"):
    with_k2_gradient(_name, divergences[_name].function)


def estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the named estimator's value for each token, (N,). Raises KeyError for an unknown name."""
    return divergences[name].function(log_probs, ref_log_probs)

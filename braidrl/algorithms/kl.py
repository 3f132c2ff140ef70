"""Estimates of KL(π, π_ref) from log-probs of sampled tokens, one number per token.

With x = log π − log π_ref: k1 = x, k2 = x²/2, k3 = e^(−x) + x − 1, after J. Schulman, "Approximating KL divergence" (2020). A name
with `+` has that value and the gradient of k2, whose expectation under π is the gradient of the divergence itself.
"""

from collections.abc import Callable

from torch import Tensor

from braidrl.algorithms.ratios import LOG_RATIO_LIMIT
from braidrl.algorithms.registry import divergences


@divergences.register()
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log(π/π_ref), (N,): unbiased, of either sign, and with a gradient that is 0 in expectation."""
    return log_probs - ref_log_probs


@divergences.register()
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """½·(log π/π_ref)², (N,): biased in value, unbiased in gradient."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


@divergences.register()
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """π_ref/π − log(π_ref/π) − 1, (N,): unbiased and never negative. GRPO, arXiv 2402.03300, equation 4."""
    inverse = ref_log_probs - log_probs
    return inverse.clamp(max=LOG_RATIO_LIMIT).expm1() - inverse


@divergences.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log(π/π_ref)|, (N,)."""
    return (log_probs - ref_log_probs).abs()


def with_k2_gradient(name: str, value_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register `name+`: the value of `value_of` and the gradient of k2."""

    def estimator(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        carrier = k2(log_probs, ref_log_probs)
        return value_of(log_probs, ref_log_probs).detach() + carrier - carrier.detach()

    divergences.register(f"{name}+")(estimator)


for _name in ("k1", "k2", "k3", "abs"):
    with_k2_gradient(_name, divergences[_name].function)


def estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the named estimator's value for each token, (N,). Raises KeyError for a name that is not registered."""
    value: Tensor = divergences[name].function(log_probs, ref_log_probs)
    return value

"""Losses of a policy and of a critic, per action token and before aggregation. r = π/π_old.

A loss takes flat action tokens and returns `(loss, metrics)`: the loss of each token (N,) with its gradient, and
detached metrics per token (N,). Metrics are averaged over tokens; a metric whose name ends in `_max` is reduced by its
maximum.
"""

from typing import Literal

from braidrl.algorithms.aggregation import Metrics
from braidrl.algorithms.kl import LOG_RATIO_LIMIT, ratio
from braidrl.algorithms.registry import Needs, losses
from braidrl.deferred import Tensor, torch

CLIP = Needs({"low": (0, 1), "high": (0, 1e6), "dual": (1, 1e6)})


@losses.register(needs=CLIP)
def clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Return −min(r·A, clip(r, 1 − low, 1 + high)·A); with `dual` c, at most −c·A where A < 0.

    PPO, arXiv 1707.06347, equation 7; high > low is Clip-Higher, DAPO, arXiv 2503.14476, equation 10 (0.2 and 0.28);
    dual clip, arXiv 1912.09729.
    """
    r = ratio(log_probs, old_log_probs)
    loss, metrics = clipped_surrogate(r, advantages, low, high, log_probs, old_log_probs)
    if dual is not None:
        bound = -dual * advantages
        metrics["clip_fraction_dual"] = ((advantages < 0) & (loss > bound)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, metrics


def clipped_surrogate(
    r: Tensor, advantages: Tensor, low: float, high: float, log_probs: Tensor, old_log_probs: Tensor
) -> tuple[Tensor, Metrics]:
    """Return −min(r·A, clip(r, 1 − low, 1 + high)·A), (N,), with its metrics; a clipped token has no gradient."""
    above, below = (advantages > 0) & (r > 1 + high), (advantages < 0) & (r < 1 - low)
    loss = -torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)
    return loss, clip_metrics(above, below, log_probs, old_log_probs)


def clip_metrics(above: Tensor, below: Tensor, log_probs: Tensor, old_log_probs: Tensor) -> Metrics:
    """Return indicators of tokens clipped from above and below, the probability of those clipped from above, and
    KL(π_old, π).
    """
    probability = log_probs.detach().exp() * above
    return {
        "clip_fraction": (above | below).to(probability.dtype),
        "clip_fraction_low": below.to(probability.dtype),
        "clip_fraction_high": above.to(probability.dtype),
        "clip_high_probability": probability,
        "clip_high_probability_max": probability,
        **kl_metrics(log_probs, old_log_probs),
    }


def kl_metrics(log_probs: Tensor, old_log_probs: Tensor) -> Metrics:
    """Return KL(π_old, π) of each token by k3, which is r − 1 − log r on tokens sampled from π_old."""
    log_ratio = (log_probs - old_log_probs).detach()
    return {"kl_old": log_ratio.clamp(max=LOG_RATIO_LIMIT).expm1() - log_ratio}


@losses.register(needs=Needs({"low": (0, 1), "high": (0, 1e6)}))
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float = 1.0, high: float = 4.0
) -> tuple[Tensor, Metrics]:
    """Return −sg(clip(r, 1 − low, 1 + high))·A·log π: weights are clipped, and every token keeps its gradient.

    MiniMax-M1, arXiv 2506.13585, which sets no lower bound (low = 1) and does not publish its upper bound; 1 + high = 5
    is from ScaleRL, arXiv 2510.13786.
    """
    r = ratio(log_probs, old_log_probs).detach()
    # CISPO clips a weight for either sign of the advantage.
    metrics = clip_metrics(r > 1 + high, r < 1 - low, log_probs, old_log_probs)
    return -r.clamp(1 - low, 1 + high) * advantages * log_probs, metrics


@losses.register(needs=Needs({"tau_positive": (1e-3, 1e3), "tau_negative": (1e-3, 1e3)}))
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """Return −(4/τ)·σ(τ(r − 1))·A: a smooth gate; τ depends on the sign of A. SAPO, arXiv 2511.20347."""
    r = ratio(log_probs, old_log_probs)
    tau = torch.full_like(r, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * advantages, kl_metrics(log_probs, old_log_probs)


@losses.register(needs=Needs({"delta": (0, 1)}, weighs_rollout=True))
def dppo_tv(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, delta: float = 0.15
) -> tuple[Tensor, Metrics]:
    """Return −(π/μ)·A, 0 where A > 0 and π − μ > delta, or A < 0 and π − μ < −delta; μ is the rollout policy.

    The trust region is in total variation: rare tokens may change by large ratios. DPPO, arXiv 2602.04879.
    """
    moved = log_probs.detach().exp() - rollout_log_probs.exp()
    above, below = (advantages > 0) & (moved > delta), (advantages < 0) & (moved < -delta)
    r = ratio(log_probs, rollout_log_probs)
    metrics = clip_metrics(above, below, log_probs, rollout_log_probs)
    return -(r * advantages).masked_fill(above | below, 0), metrics


@losses.register(
    needs=Needs(
        {"low": (0, 1), "high": (0, 1e6), "cap": (1, 1e6)}, {"over_cap": ("clamp", "mask")}, weighs_rollout=True
    )
)
def decoupled(
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 5.0,
    over_cap: Literal["clamp", "mask"] = "clamp",
) -> tuple[Tensor, Metrics]:
    """Return −w·min(u·A, clip(u, 1 − low, 1 + high)·A) with u = π/π_prox and w = π_prox/π_behaviour.

    AReaL, arXiv 2505.24298. π_prox is `old_log_probs`, recomputed under the weights at the start of the update;
    π_behaviour is the policy that sampled the tokens. Where w is above `cap` it is clamped, or the token is masked
    (`over_cap`).
    """
    w = ratio(old_log_probs, rollout_log_probs)
    over = w > cap
    weight = w.clamp(max=cap) if over_cap == "clamp" else w.masked_fill(over, 0)
    u = ratio(log_probs, old_log_probs)
    loss, metrics = clipped_surrogate(u, advantages, low, high, log_probs, old_log_probs)
    return weight * loss, metrics | {"ratio": w, "ratio_squared": w**2, "cut_fraction": over.to(w.dtype)}


@losses.register()
def reinforce(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """Return −A·log π. Williams, "Simple statistical gradient-following algorithms", 1992."""
    return -advantages * log_probs, {}


@losses.register()
def sft(log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Return −log π of given tokens: REINFORCE with every advantage 1."""
    return -log_probs, {}


@losses.register()
def ptx(log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Return −log π of pre-training text, added to a policy loss.

    PPO-ptx, InstructGPT, arXiv 2203.02155, equation 2.
    """
    return sft(log_probs)


@losses.register()
def distillation(log_probs: Tensor, ref_log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Return −sg(log π_teacher − log π)·log π on tokens sampled from π; its gradient is that of the reverse KL.

    arXiv 2306.13649.
    """
    gap = (ref_log_probs - log_probs).detach()
    return -gap * log_probs, {"kl_teacher": -gap}


@losses.register(columns={"old_values": "values"}, needs=Needs({"clip": (0, 1e6)}))
def value(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> tuple[Tensor, Metrics]:
    """Return ½·max((V − R)², (clip(V, V_old ± clip) − R)²) per action token, (N,); without `clip` ½·(V − R)².

    PPO as in its authors' implementation, arXiv 1707.06347. The metrics include the moments for explained variance.
    """
    loss = (values - returns) ** 2
    clipped = torch.zeros_like(returns)
    if clip is not None:
        change = values - old_values
        clipped_loss = (old_values + change.clamp(-clip, clip) - returns) ** 2
        # Within the range `other` differs from `loss` by rounding.
        clipped = ((change.abs() > clip) & (clipped_loss > loss)).to(returns.dtype)
        loss = torch.maximum(loss, clipped_loss)
    error = (returns - values).detach()
    return 0.5 * loss, {
        "clip_fraction": clipped,
        "values": values.detach(),
        "returns": returns,
        "returns_squared": returns**2,
        "error": error,
        "error_squared": error**2,
    }

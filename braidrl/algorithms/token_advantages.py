"""Advantages per action token other than GAE, and whitening over the batch in two passes: sums, then apply."""

import torch
from torch import Tensor

from braidrl.algorithms.gae import rewards_of_tokens, same_for_rows, sums_to_go
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, advantages

BatchSums = dict[str, Tensor]
DISCOUNT = Needs({"gamma": (0, 1)})


def moments(tokens: Ragged, statistics_mask: Tensor | None) -> BatchSums:
    """Return count, sum and sum of squares over the action tokens of unmasked rows, float64."""
    counted = tokens.values.new_ones(len(tokens)) if statistics_mask is None else statistics_mask > 0
    weights, values = tokens.spread(counted).double(), tokens.values.double()
    return {"count": weights.sum(), "sum": (weights * values).sum(), "squares": (weights * values**2).sum()}


def whitened(tokens: Ragged, totals: BatchSums, epsilon: float) -> Ragged:
    """Return (x − mean)/√(variance + epsilon), with the sample variance."""
    count = totals["count"].clamp(min=1)
    mean = totals["sum"] / count
    variance = ((totals["squares"] - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    return tokens.with_values(((tokens.values - mean) / (variance + epsilon).sqrt()).to(tokens.values.dtype))


def whiten_sums(advantages: Ragged, statistics_mask: Tensor | None = None, *, epsilon: float = 1e-8) -> BatchSums:
    """Return the moments of the advantages, for `whiten`."""
    return moments(advantages, statistics_mask)


@advantages.register(writes=["advantages"], scope="batch", sums=whiten_sums)
def whiten(
    advantages: Ragged, statistics_mask: Tensor | None = None, *, epsilon: float = 1e-8, totals: BatchSums
) -> Ragged:
    """Normalise advantages to mean 0 and deviation 1 over the batch's action tokens, as implementations of PPO do.

    Args:
        epsilon: Added to the variance.
        totals: `whiten_sums` over the batch.
    """
    return whitened(advantages, totals, epsilon)


def returns_to_go(reward: Tensor, action_tokens: Tensor, token_rewards: Ragged | None, gamma: float) -> Ragged:
    """Return Σ_l γ^l·r_{t+l} per action token; without `token_rewards` the reward (B,) is given at the row's last one."""
    if token_rewards is None:
        empty = reward.new_zeros(int(action_tokens.sum()))
        token_rewards = rewards_of_tokens(reward, None, Ragged.from_lengths(empty, action_tokens))
    return sums_to_go(token_rewards, same_for_rows(token_rewards, gamma))


def return_sums(
    reward: Tensor,
    action_tokens: Tensor,
    token_rewards: Ragged | None = None,
    statistics_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
) -> BatchSums:
    """Return the moments of the batch's returns-to-go."""
    return moments(returns_to_go(reward, action_tokens, token_rewards, gamma), statistics_mask)


@advantages.register(writes=["advantages"], scope="batch", sums=return_sums, needs=DISCOUNT)
def reinforce_plus_plus(
    reward: Tensor,
    action_tokens: Tensor,
    token_rewards: Ragged | None = None,
    statistics_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
    totals: BatchSums,
) -> Ragged:
    """Return returns-to-go per action token, whitened over the batch. REINFORCE++, arXiv 2501.03262.

    Args:
        gamma: Discount per action token.
        epsilon: Added to the variance.
        totals: `return_sums` over the batch.
    """
    return whitened(returns_to_go(reward, action_tokens, token_rewards, gamma), totals, epsilon)


def baseline_sums(
    advantage: Tensor, action_tokens: Tensor, statistics_mask: Tensor | None = None, *, epsilon: float = 1e-8
) -> BatchSums:
    """Return the moments of the rows' centred rewards over action tokens."""
    return moments(returns_to_go(advantage, action_tokens, None, 1.0), statistics_mask)


@advantages.register(writes=["advantages"], scope="batch", sums=baseline_sums)
def reinforce_plus_plus_baseline(
    advantage: Tensor,
    action_tokens: Tensor,
    statistics_mask: Tensor | None = None,
    *,
    epsilon: float = 1e-8,
    totals: BatchSums,
) -> Ragged:
    """Return `advantage` whitened over the batch's action tokens. `group_centered` comes before and writes R − R̄.

    REINFORCE++, the variant with a baseline, arXiv 2501.03262.

    Args:
        epsilon: Added to the variance.
        totals: `baseline_sums` over the batch.
    """
    return whitened(returns_to_go(advantage, action_tokens, None, 1.0), totals, epsilon)


@advantages.register(writes=["advantages"])
def distillation(rollout_log_probs: Ragged, ref_log_probs: Ragged, old_log_probs: Ragged | None = None) -> Ragged:
    """Return log π_teacher − log π per action token; the teacher is the reference. On-policy distillation, arXiv 2306.13649."""
    student = rollout_log_probs if old_log_probs is None else old_log_probs
    return student.with_values(ref_log_probs.values - student.values)


def cost_sums(
    advantages: Ragged, cost_advantages: Ragged, cost: Tensor, *, threshold: float = 0.0, learning_rate: float = 0.1
) -> BatchSums:
    """Return the sums for the batch's mean cost."""
    return {"cost": cost.double().sum(), "rows": torch.tensor(float(len(cost)))}


def next_multiplier(
    state: dict[str, float], totals: dict[str, float], *, threshold: float = 0.0, learning_rate: float = 0.1
) -> dict[str, float]:
    """Return max(0, λ + learning_rate·(the batch's mean cost − threshold)): gradient ascent on the constraint. arXiv 2310.12773."""
    mean = totals["cost"] / max(totals["rows"], 1.0)
    return {"multiplier": max(0.0, state["multiplier"] + learning_rate * (mean - threshold))}


@advantages.register(
    writes=["advantages"],
    sums=cost_sums,
    state={"multiplier": 1.0},
    update_state=next_multiplier,
    needs=Needs({"multiplier": (0, float("inf")), "learning_rate": (0, 1e6)}),
)
def safe_rlhf(
    advantages: Ragged,
    cost_advantages: Ragged,
    cost: Tensor,
    *,
    threshold: float = 0.0,
    learning_rate: float = 0.1,
    state: dict[str, float],
) -> Ragged:
    """Return (A_reward − λ·A_cost)/(1 + λ) per action token. Safe-RLHF, arXiv 2310.12773.

    After each iteration λ rises by learning_rate·(mean of `cost` − threshold), kept ≥ 0.

    Args:
        threshold: The highest allowed mean cost.
        learning_rate: Learning rate of λ.
        state: `multiplier`, λ.
    """
    multiplier = state["multiplier"]
    mixed = advantages.values - multiplier * cost_advantages.values
    return advantages.with_values(mixed / (1 + multiplier))

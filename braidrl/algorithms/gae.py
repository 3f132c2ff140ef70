"""Generalised advantage estimation: one advantage and one return per action token.

The recursion runs over a row's action tokens in order, across its sequences. Prompt and observation tokens were not sampled and are
skipped: δ_t compares an action token with the row's next one.
"""

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, advantages

DISCOUNTS = Needs({"gamma": (0, 1), "lam": (0, 1)})


def is_row_end(rows: Ragged) -> Tensor:
    """Return True at the last entry of each non-empty row, (N,) bool."""
    row = rows.row_ids()
    following = torch.cat([row[1:], row.new_full((min(len(row), 1),), -1)])
    return row != following


def at_row_end(per_row: Tensor, rows: Ragged) -> Ragged:
    """Place one number per row (B,) at the row's last entry, 0 elsewhere."""
    return rows.with_values(rows.spread(per_row) * is_row_end(rows))


def sums_to_go(rows: Ragged, decay: Tensor) -> Ragged:
    """Return x_t + d·x_{t+1} + d²·x_{t+2} + ... to the row's end, with a decay d per row (B,).

    Rows are aligned at their ends, so that the loop has one step per position of the longest row and not one per token.
    """
    row, lengths = rows.row_ids(), rows.lengths
    from_end = rows.spread(rows.offsets[1:]) - 1 - torch.arange(len(row), device=row.device)
    longest = int(lengths.max()) if len(rows) else 0
    sums_TB = rows.values.new_zeros((longest, len(rows)))
    sums_TB[from_end, row] = rows.values
    for position in range(1, longest):
        sums_TB[position].addcmul_(sums_TB[position - 1], decay)
    return rows.with_values(sums_TB[from_end, row])


def same_for_rows(rows: Ragged, number: float) -> Tensor:
    """Repeat a number for every row, (B,), with the dtype and device of the values."""
    return rows.values.new_full((len(rows),), number)


def residuals(values: Ragged, rewards: Ragged, gamma: float) -> Ragged:
    """Return δ_t = r_t + γ·V_{t+1} − V_t; V after the row's last action token is 0."""
    v = values.values
    following = torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) * ~is_row_end(values)
    return values.with_values(rewards.values.to(v.dtype) + gamma * following - v)


def rewards_of_tokens(reward: Tensor, token_rewards: Ragged | None, like: Ragged) -> Ragged:
    """Return the rewards per action token: `token_rewards`, or the row's `reward` (B,) at its last action token."""
    if token_rewards is not None:
        return token_rewards
    return at_row_end(reward.to(like.values.dtype), like)


@advantages.register(writes=["advantages", "returns"], needs=DISCOUNTS)
def gae(
    values: Ragged, reward: Tensor, token_rewards: Ragged | None = None, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Ragged, Ragged]:
    """Return A_t = Σ_l (γλ)^l·δ_{t+l} and the returns A_t + V_t, one per action token.

    GAE, arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equation 11. Without `token_rewards`, `reward` is given at the row's
    last action token.

    Args:
        gamma: Discount per action token.
        lam: λ: 0 looks one token ahead, 1 looks to the end of the row.
    """
    delta = residuals(values, rewards_of_tokens(reward, token_rewards, values), gamma)
    result = sums_to_go(delta, same_for_rows(values, gamma * lam))
    return result, values.with_values(result.values + values.values)


@advantages.register(
    writes=["advantages", "returns"],
    needs=Needs({"gamma": (0, 1), "lam_critic": (0, 1), "lam_actor": (0, 1), "alpha": (1e-6, 1e6)}),
)
def decoupled_gae(
    values: Ragged,
    reward: Tensor,
    token_rewards: Ragged | None = None,
    *,
    gamma: float = 1.0,
    lam_critic: float = 1.0,
    lam_actor: float | None = None,
    alpha: float = 0.05,
) -> tuple[Ragged, Ragged]:
    """Return `gae` with one λ for the advantages and another for the critic's returns.

    VC-PPO, arXiv 2503.01491, with a given `lam_actor`; VAPO, arXiv 2504.05118, without one.

    Args:
        gamma: Discount per action token.
        lam_critic: λ of the returns.
        lam_actor: λ of the advantages; by default 1 − 1/(alpha·l), in [0, 1], for a row of l action tokens.
        alpha: See `lam_actor`.
    """
    delta = residuals(values, rewards_of_tokens(reward, token_rewards, values), gamma)
    lam = actor_lambda(values.lengths, alpha) if lam_actor is None else same_for_rows(values, lam_actor)
    result = sums_to_go(delta, (gamma * lam).to(values.values))
    of_critic = sums_to_go(delta, same_for_rows(values, gamma * lam_critic))
    return result, values.with_values(of_critic.values + values.values)


def actor_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return λ = 1 − 1/(alpha·l), clamped to [0, 1], for rows of `lengths` (B,) action tokens; (B,) float64."""
    return (1 - 1 / (alpha * lengths.clamp(min=1).double())).clamp(0, 1)


advantages.register(
    "cost_gae",
    writes=["cost_advantages", "cost_returns"],
    needs=DISCOUNTS,
    columns={"values": "cost_values", "reward": "cost", "token_rewards": "cost_token_rewards"},
)(gae)

"""Advantages per action token: GAE and others, and whitening over the batch in two passes: sums, then apply.

GAE's recursion runs over a row's action tokens in order, across its sequences. Prompt and observation tokens were not
sampled and are skipped: δ_t compares an action token with the row's next one.
"""

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, advantages
from braidrl.deferred import Tensor, torch

DISCOUNTS = Needs({"gamma": (0, 1), "lam": (0, 1)})


def is_row_end(rows: Ragged) -> Tensor:
    """Return True at the last entry of each non-empty row, (N,) bool."""
    row = rows.row_ids()
    following = torch.cat([row[1:], row.new_full((min(len(row), 1),), -1)])
    return row != following


def at_row_end(per_row: Tensor, rows: Ragged) -> Ragged:
    """Place one number per row (B,) at the row's last entry, 0 elsewhere."""
    return rows.with_values(rows.spread(per_row) * is_row_end(rows))


def sums_to_go(rows: Ragged, decay: Tensor | float) -> Ragged:
    """Return x_t + d·x_{t+1} + d²·x_{t+2} + ... to the row's end, with one decay d, or one per row (B,).

    Rows are aligned at their ends, so that the loop has one step per position of the longest row and not one per token.
    """
    row, lengths = rows.row_ids(), rows.lengths
    decay_B = decay.to(rows.values) if isinstance(decay, Tensor) else rows.values.new_full((len(rows),), decay)
    from_end = rows.spread(rows.offsets[1:]) - 1 - torch.arange(len(row), device=row.device)
    longest = int(lengths.max()) if len(rows) else 0
    sums_TB = rows.values.new_zeros((longest, len(rows)))
    sums_TB[from_end, row] = rows.values
    for position in range(1, longest):
        sums_TB[position].addcmul_(sums_TB[position - 1], decay_B)
    return rows.with_values(sums_TB[from_end, row])


def residuals(values: Ragged, reward: Tensor, token_rewards: Ragged | None, gamma: float) -> Ragged:
    """Return δ_t = r_t + γ·V_{t+1} − V_t with V = 0 after a row; r are `token_rewards`, or `reward` (B,) at its last
    action token.
    """
    v = values.values
    rewards = at_row_end(reward.to(v.dtype), values) if token_rewards is None else token_rewards
    following = torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) * ~is_row_end(values)
    return values.with_values(rewards.values.to(v.dtype) + gamma * following - v)


@advantages.register(writes=["advantages", "returns"], needs=DISCOUNTS)
def gae(
    values: Ragged, reward: Tensor, token_rewards: Ragged | None = None, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Ragged, Ragged]:
    """Return A_t = Σ_l (γλ)^l·δ_{t+l} and the returns A_t + V_t, one per action token.

    GAE, arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equation 11. Without `token_rewards`, `reward` is given
    at the row's last action token.

    Args:
        gamma: Discount per action token.
        lam: λ: 0 looks one token ahead, 1 looks to the end of the row.
    """
    delta = residuals(values, reward, token_rewards, gamma)
    result = sums_to_go(delta, gamma * lam)
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

    VC-PPO, arXiv 2503.01491, with a given `lam_actor`; VAPO, arXiv 2504.05118, without one: 1 − 1/(alpha·l), in [0, 1],
    for a row of l action tokens.
    """
    delta = residuals(values, reward, token_rewards, gamma)
    adaptive = (1 - 1 / (alpha * values.lengths.clamp(min=1).double())).clamp(0, 1)
    lam = adaptive if lam_actor is None else values.values.new_full((), lam_actor)
    result = sums_to_go(delta, gamma * lam)
    of_critic = sums_to_go(delta, gamma * lam_critic)
    return result, values.with_values(of_critic.values + values.values)


advantages.register(
    "cost_gae",
    writes=["cost_advantages", "cost_returns"],
    needs=DISCOUNTS,
    columns={"values": "cost_values", "reward": "cost", "token_rewards": "cost_token_rewards"},
)(gae)


BatchSums = dict[str, Tensor]


def moments(tokens: Ragged, statistics_mask: Tensor | None = None) -> BatchSums:
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


@advantages.register(writes=["advantages"], scope="batch", sums=moments)
def whiten(
    advantages: Ragged, statistics_mask: Tensor | None = None, *, epsilon: float = 1e-8, totals: BatchSums
) -> Ragged:
    """Normalise advantages to mean 0 and deviation 1 over the batch's action tokens, as implementations of PPO do."""
    return whitened(advantages, totals, epsilon)


def returns_to_go(reward: Tensor, action_tokens: Tensor, token_rewards: Ragged | None, gamma: float) -> Ragged:
    """Return Σ_l γ^l·r_{t+l} per action token; without `token_rewards` the reward (B,) is at the row's last token."""
    if token_rewards is None:
        empty = reward.new_zeros(int(action_tokens.sum()))
        token_rewards = at_row_end(reward, Ragged.from_lengths(empty, action_tokens))
    return sums_to_go(token_rewards, gamma)


def return_sums(
    reward: Tensor,
    action_tokens: Tensor,
    token_rewards: Ragged | None = None,
    statistics_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
) -> BatchSums:
    """Return the moments of the batch's returns-to-go."""
    return moments(returns_to_go(reward, action_tokens, token_rewards, gamma), statistics_mask)


@advantages.register(writes=["advantages"], scope="batch", sums=return_sums, needs=Needs({"gamma": (0, 1)}))
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
    """Return returns-to-go per action token, whitened over the batch. REINFORCE++, arXiv 2501.03262."""
    return whitened(returns_to_go(reward, action_tokens, token_rewards, gamma), totals, epsilon)


def baseline_sums(advantage: Tensor, action_tokens: Tensor, statistics_mask: Tensor | None = None) -> BatchSums:
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
    """Return `advantage` (R − R̄ of `group_centered`) whitened over the batch's tokens.

    REINFORCE++ with baseline, arXiv 2501.03262.
    """
    return whitened(returns_to_go(advantage, action_tokens, None, 1.0), totals, epsilon)


@advantages.register(writes=["advantages"])
def distillation(rollout_log_probs: Ragged, ref_log_probs: Ragged, old_log_probs: Ragged | None = None) -> Ragged:
    """Return log π_teacher − log π per action token; the teacher is the reference.

    On-policy distillation, arXiv 2306.13649.
    """
    student = rollout_log_probs if old_log_probs is None else old_log_probs
    return student.with_values(ref_log_probs.values - student.values)


def cost_sums(advantages: Ragged, cost_advantages: Ragged, cost: Tensor) -> BatchSums:
    """Return the sums for the batch's mean cost."""
    return {"cost": cost.double().sum(), "rows": torch.tensor(float(len(cost)))}


def next_multiplier(
    state: dict[str, float], totals: dict[str, float], *, threshold: float = 0.0, learning_rate: float = 0.1
) -> dict[str, float]:
    """Return max(0, λ + learning_rate·(the batch's mean cost − threshold)): gradient ascent on the constraint. arXiv
    2310.12773.
    """
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
    """Return (A_reward − λ·A_cost)/(1 + λ); λ ≥ 0 rises by learning_rate·(mean `cost` − threshold) per iteration. arXiv
    2310.12773.
    """
    multiplier = state["multiplier"]
    mixed = advantages.values - multiplier * cost_advantages.values
    return advantages.with_values(mixed / (1 + multiplier))

"""Reward shaping: length penalties, masks for truncated rows, and the KL penalty in the reward."""

from dataclasses import replace

from braidrl.algorithms.kl import estimate
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, divergences, shapes
from braidrl.algorithms.token_advantages import at_row_end, sums_to_go
from braidrl.deferred import Tensor, torch

KL = Needs({"coef": (0, 1e6)}, {"estimator": divergences})

# Value of the `finish_reason` column for a row that was truncated at the length limit.
CUT_OFF = 1


@shapes.register(writes=["reward"], needs=Needs({"max_response_tokens": (1, 1 << 40), "cache": (1, 1 << 40)}))
def overlong_penalty(reward: Tensor, action_tokens: Tensor, *, max_response_tokens: int, cache: int) -> Tensor:
    """Return `reward` with soft overlong punishment, (B,): 0 up to max − cache action tokens, falling to −1 at max, −1
    beyond.

    DAPO, arXiv 2503.14476, equation 13. Raises ValueError unless 0 < cache ≤ max.
    """
    if not 0 < cache <= max_response_tokens:
        raise ValueError(f"cache must lie between 1 and max_response_tokens ({max_response_tokens}), got {cache}")
    beyond = action_tokens - (max_response_tokens - cache)
    return reward - (beyond.to(reward.dtype) / cache).clamp(0, 1)


@shapes.register(writes=["loss_mask"])
def overlong_filter(finish_reason: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Return 0 for rows truncated at the length limit and 1 for others, (B,) float32, times an earlier mask.

    Overlong filtering, DAPO, arXiv 2503.14476, section 3.4: such rows are excluded from the loss, but not from their
    group's statistics.
    """
    is_complete = (finish_reason != CUT_OFF).to(torch.float32)
    return is_complete if loss_mask is None else is_complete * loss_mask


@shapes.register(writes=["loss_mask", "statistics_mask"])
def overlong_exclude(
    finish_reason: Tensor, loss_mask: Tensor | None = None, statistics_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply `overlong_filter`, and exclude truncated rows from their group's statistics too; two masks (B,) float32."""
    return overlong_filter(finish_reason, loss_mask), overlong_filter(finish_reason, statistics_mask)


@shapes.register(writes=["response_log_prob"])
def response_log_prob(old_log_probs: Ragged) -> Tensor:
    """Return the sum of the log-probs of each row's action tokens, (B,) float64."""
    return old_log_probs.with_values(old_log_probs.values.double()).row_sums()


@shapes.register(writes=["score"])
def implicit_reward(old_log_probs: Ragged, ref_log_probs: Ragged) -> Tensor:
    """Return the sum over each row's action tokens of log π − log π_ref, (B,) float64: the reward that a policy and its
    reference imply, without β and a term of the prompt alone.

    DPO, arXiv 2305.18290, equation 5.
    """
    return old_log_probs.with_values(old_log_probs.values.double() - ref_log_probs.values.double()).row_sums()


@shapes.register(writes=["token_rewards"], needs=KL)
def kl_penalty(
    reward: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    coef: float,
    estimator: str = "k1",
) -> Ragged:
    """Return −coef·KL(π, π_ref) per action token, plus `reward` (B,) at the row's last one.

    arXiv 1909.08593, equation 2, per token as in InstructGPT, arXiv 2203.02155. π is `old_log_probs` where a stage
    writes them and the engine's `rollout_log_probs` otherwise.
    """
    return kl_shaped(reward, kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator), -coef)


@shapes.register(writes=["reward"], needs=KL)
def row_kl_penalty(
    reward: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    coef: float,
    estimator: str = "k1",
) -> Tensor:
    """Return `reward` (B,) minus coef·KL(π, π_ref) summed over the row, for advantages per row (RLOO). arXiv
    1909.08593, equation 2.
    """
    kl = kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator)
    return reward - coef * kl.row_sums().to(reward.dtype)


@shapes.register(writes=["advantages"], needs=KL)
def advantage_kl_penalty(
    advantage: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    coef: float,
    estimator: str = "k1",
) -> Ragged:
    """Return the row's `advantage` (B,) minus coef·KL(π, π_ref) summed from each action token to the row's end.

    This is a KL penalty per token in the return, while the baseline has none, as in ReMax, arXiv 2310.10505.
    """
    to_go = sums_to_go(kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator), 1.0)
    return to_go.with_values(to_go.spread(advantage).to(to_go.values.dtype) - coef * to_go.values)


def kl_sums(
    reward: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    estimator: str = "k1",
) -> dict[str, Tensor]:
    """Return the sums for the batch's mean KL per row."""
    kl = kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator)
    return {"kl": kl.values.double().sum(), "rows": torch.tensor(float(len(kl)))}


def next_kl_coefficient(
    state: dict[str, float], totals: dict[str, float], *, target: float, gain: float = 0.1
) -> dict[str, float]:
    """Return coef·(1 + gain·e), e the relative error of the batch's mean KL, clamped to ±0.2. arXiv 1909.08593, section
    2.2.
    """
    kl = totals["kl"] / max(totals["rows"], 1.0)
    error = max(-0.2, min(0.2, (kl - target) / target))
    return {"coef": state["coef"] * (1 + gain * error)}


@shapes.register(
    writes=["token_rewards"],
    sums=kl_sums,
    state={"coef": 0.05},
    update_state=next_kl_coefficient,
    needs=replace(KL, limits={"coef": (0, 1e6), "target": (1e-9, 1e6), "gain": (0, 1e6)}),
)
def adaptive_kl_penalty(
    reward: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    target: float,
    gain: float = 0.1,
    estimator: str = "k1",
    state: dict[str, float],
) -> Ragged:
    """Return `kl_penalty` with a coefficient that is adapted to a target of the mean KL, in nats per row. arXiv
    1909.08593, section 2.2.
    """
    return kl_shaped(reward, kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator), -state["coef"])


@shapes.register(writes=["token_rewards", "cost_token_rewards"], needs=KL)
def safe_rlhf_kl_penalty(
    reward: Tensor,
    cost: Tensor,
    rollout_log_probs: Ragged,
    ref_log_probs: Ragged,
    old_log_probs: Ragged | None = None,
    *,
    coef: float,
    estimator: str = "k1",
) -> tuple[Ragged, Ragged]:
    """Return rewards minus half of the KL penalty, and costs plus half of it, per action token.

    Safe-RLHF, arXiv 2310.12773: (reward − λ·cost)/(1 + λ) then contains the penalty coef/2 for every λ.
    """
    kl = kl_of(rollout_log_probs, ref_log_probs, old_log_probs, estimator)
    return kl_shaped(reward, kl, -coef / 2), kl_shaped(cost, kl, coef / 2)


def kl_of(rollout_log_probs: Ragged, ref_log_probs: Ragged, old_log_probs: Ragged | None, estimator: str) -> Ragged:
    """Return KL(π, π_ref) per action token; π is `old_log_probs` if a stage writes them, otherwise the engine's."""
    policy = rollout_log_probs if old_log_probs is None else old_log_probs
    return policy.with_values(estimate(estimator, policy.values, ref_log_probs.values))


def kl_shaped(per_row: Tensor, kl: Ragged, factor: float) -> Ragged:
    """Return factor·KL per action token, plus `per_row` (B,) at the row's last one."""
    return kl.with_values(factor * kl.values + at_row_end(per_row.to(kl.values.dtype), kl).values)


def expected_points(rating: float) -> float:
    """Return the expected share of points for a lead in Elo points, 1/(1 + 10^(−rating/400))."""
    return 1 / (1 + 10 ** (-rating / 400))


def game_sums(score: Tensor, action_tokens: Tensor, statistics_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return the policy's points, 1 for a positive score and 1/2 for 0, and the number of rows with an action of the
    policy.
    """
    played = (action_tokens > 0).double()
    if statistics_mask is not None:
        played = played * (statistics_mask > 0)
    points = (torch.sign(score.double()) + 1) / 2
    return {"points": (points * played).sum(), "games": played.sum()}


def next_rating(state: dict[str, float], totals: dict[str, float], *, gain: float = 200.0) -> dict[str, float]:
    """Return rating + gain·(s − E) for the share of points s in this batch and its expectation E; without games the
    rating is unchanged.
    """
    if not totals["games"]:
        return dict(state)
    return {"rating": state["rating"] + gain * (totals["points"] / totals["games"] - expected_points(state["rating"]))}


@shapes.register(
    writes=["expected_points"],
    sums=game_sums,
    state={"rating": 0.0},
    update_state=next_rating,
    needs=Needs({"rating": (-1e4, 1e4), "gain": (0, 1e4)}),
)
def elo(
    score: Tensor,
    action_tokens: Tensor,
    statistics_mask: Tensor | None = None,
    *,
    gain: float = 200.0,
    state: dict[str, float],
) -> Tensor:
    """Return the expected points (B,) of each row's policy, from a rating that follows its results: its lead over those
    it plays, in Elo points.

    A score above 0 is a win, 0 a draw, below 0 a loss. The rating is in the metrics, and in checkpoints.

    Args:
        gain: Elo points by which a batch of wins raises a rating of 0, times two.
    """
    return torch.full_like(score, expected_points(state["rating"]))

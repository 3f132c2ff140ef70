"""PPO, arXiv 1707.06347, as in RLHF, arXiv 2203.02155: a critic, and the KL divergence from the reference in the reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from braidrl.flow import Flow, When, actor, advantage, critic, loss, reference, reward, shape
from braidrl.flow.recipes.parameters import PolicyParameters


class PpoParameters(PolicyParameters):
    """Of PPO."""

    reward: Literal["score", "verify"] = "score"
    """Reward by a model (`score`) or by rules (`verify`)."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL penalty in the reward; 0 needs no reference model."""
    kl_estimator: str = "k1"
    """How the KL divergence from the reference is estimated."""
    gamma: float = Field(1.0, gt=0, le=1)
    """γ: discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move from the one before the update; none does not clip."""
    critic_warmup: int = Field(0, ge=0)
    """Iterations that train the critic alone."""


def ppo(p: PpoParameters) -> Flow:
    """Rewards per token, advantages by GAE, a clipped ratio for the actor and a clipped value for the critic."""
    penalty = [shape.kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []
    stages = [
        actor.generate(),
        reward.score() if p.reward == "score" else reward.verify(),
        *([reference.log_probs()] if penalty else []),
        critic.values(),
        *penalty,
        advantage.gae(gamma=p.gamma, lam=p.lam),
        critic.update(loss=loss.value(clip=p.value_clip)),
        actor.update(
            loss=loss.clip(low=p.clip_low, high=p.clip_high, dual=p.dual_clip),
            aggregate=p.aggregate,
            old=p.old,
            entropy_coef=p.entropy_coef,
            correction=p.correction,
            when=When(start=p.critic_warmup + 1),
        ),
    ]
    return Flow("ppo", stages)

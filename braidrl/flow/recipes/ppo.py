"""PPO, arXiv 1707.06347, as in RLHF, arXiv 2203.02155: a critic, and the KL divergence from the reference in the
reward.

PPO-ptx, of the second paper, adds a language-model loss on pre-training text.
"""

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, Stage, When, actor, advantage, critic, loss, shape
from braidrl.flow.recipes.parts import (
    ClippedParameters,
    KlParameters,
    policy_update,
    reference_model,
    rewarded,
    surrogate,
)


class CriticParameters(ClippedParameters, KlParameters):
    """Parameters of every recipe with a critic."""

    reward: str | dict[str, float] = "score"
    """Source of rewards: `score` (the reward model), `verify` (rules), another role with a reward model, or several
    with weights.
    """
    gamma: float = Field(1.0, gt=0, le=1)
    """γ: discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    whiten: bool = False
    """Normalise the advantages to mean 0 and deviation 1 over the batch."""
    value_clip: float | None = Field(0.2, gt=0)
    """Largest change of a value from the value before the update; null disables clipping."""
    critic_warmup: int = Field(0, ge=0)
    """Number of first iterations that train only the critic."""


class PpoParameters(CriticParameters):
    kl_target: float | None = Field(None, gt=0)
    """Target of the mean KL per response, in nats; the penalty's weight is adapted to it. Null keeps `kl_coef`."""


class PpoPtxParameters(PpoParameters):
    ptx_coef: float = Field(27.8, gt=0)
    """γ of the paper: weight of the text's mean −log π per token, added to the policy loss. The text is `data.ptx`."""


def ppo(p: PpoParameters) -> Flow:
    """Return the flow: rewards per token, advantages by GAE, a clipped ratio for the actor and a clipped value for the
    critic.
    """
    return Flow("ppo", ppo_stages(p))


def ppo_ptx(p: PpoPtxParameters) -> Flow:
    """Return the flow: PPO, and in the same optimizer step a language-model loss on text that is joined to the rows."""
    return Flow("ppo_ptx", ppo_stages(p, ptx_coef=p.ptx_coef))


def ppo_stages(p: PpoParameters, estimator: Stage | None = None, **update: Any) -> list[Stage]:
    """Return PPO's eight stages, by default with GAE; without a KL penalty the reference's are absent.

    `update` is for the actor.
    """
    if p.kl_target is None:
        penalty = shape.kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)
    else:
        penalty = shape.adaptive_kl_penalty(coef=p.kl_coef, target=p.kl_target, estimator=p.kl_estimator)
    return [
        actor.generate(),
        *rewarded(p.reward),
        *reference_model(p),
        critic.values(),
        *([penalty] if p.kl_coef > 0 else []),
        estimator or advantage.gae(gamma=p.gamma, lam=p.lam),
        *([advantage.whiten()] if p.whiten else []),
        critic.update(loss=loss.value(clip=p.value_clip)),
        *policy_update(p, surrogate(p), **update, when=When(start=p.critic_warmup + 1)),
    ]

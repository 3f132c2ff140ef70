"""GRPO, arXiv 2402.03300: the advantage of a response is its reward relative to the others of its prompt."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, actor, advantage, loss, reference, reward
from braidrl.flow.recipes.parameters import PolicyParameters


class GrpoParameters(PolicyParameters):
    """Of GRPO."""

    aggregate: str | dict[str, Any] = "seq-mean-token-mean"
    """How the losses of tokens become one number; the paper's is the mean over rows of row means."""
    kl_coef: float = Field(0.04, ge=0)
    """β: weight of the KL term in the loss; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """How the KL divergence from the reference is estimated."""
    normalise: bool = True
    """Divide the advantages by the standard deviation of their group."""


def grpo(p: GrpoParameters) -> Flow:
    """Groups of verified responses, and a KL term in the loss."""
    kl = {"name": p.kl_estimator, "coef": p.kl_coef} if p.kl_coef > 0 else None
    stages = [
        actor.generate(),
        reward.verify(),
        *([reference.log_probs()] if kl else []),
        advantage.group_normalized() if p.normalise else advantage.group_centered(),
        actor.update(
            loss=loss.clip(low=p.clip_low, high=p.clip_high, dual=p.dual_clip),
            aggregate=p.aggregate,
            old=p.old,
            kl=kl,
            entropy_coef=p.entropy_coef,
            correction=p.correction,
        ),
    ]
    return Flow("grpo", stages)

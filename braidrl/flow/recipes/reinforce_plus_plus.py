"""REINFORCE++, arXiv 2501.03262: returns whitened over the whole batch replace a critic or a group baseline."""

from pydantic import Field

from braidrl.flow import Flow, actor, advantage, shape
from braidrl.flow.recipes.parts import (
    ClippedParameters,
    KlParameters,
    policy_update,
    reference_model,
    rewarded,
    surrogate,
)


class ReinforcePlusPlusParameters(ClippedParameters, KlParameters):
    baseline: bool = False
    """Use the variant with a baseline: it subtracts the mean reward of the prompt's samples, and its KL term is in the
    loss.
    """
    gamma: float = Field(1.0, gt=0, le=1)
    """γ: discount per token; unused in the variant with a baseline."""


def reinforce_plus_plus(p: ReinforcePlusPlusParameters) -> Flow:
    """Return the flow: PPO's loss and KL penalty per token, without a critic."""
    if p.baseline:
        estimated = [advantage.group_centered(), advantage.reinforce_plus_plus_baseline()]
        kl = {"name": "k2", "coef": p.kl_coef} if p.kl_coef > 0 else None
    else:
        penalty = [shape.kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []
        estimated = [*penalty, advantage.reinforce_plus_plus(gamma=p.gamma)]
        kl = None
    return Flow(
        "reinforce_plus_plus",
        [
            actor.generate(),
            *rewarded(p.reward),
            *reference_model(p),
            *estimated,
            *policy_update(p, surrogate(p), kl=kl),
        ],
    )

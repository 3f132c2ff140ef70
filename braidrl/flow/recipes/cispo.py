"""CISPO, MiniMax-M1, arXiv 2506.13585: the importance weight is clipped, so that no token loses its gradient."""

from pydantic import Field

from braidrl.flow import Flow, actor, advantage, loss
from braidrl.flow.recipes.parts import PolicyParameters, policy_update, rewarded


class CispoParameters(PolicyParameters):
    clip_low: float = Field(1.0, ge=0, le=1)
    """ε_low: weights below 1 − ε_low are raised to it; 1 sets no lower bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """ε_high: weights above 1 + ε_high are lowered to it."""


def cispo(p: CispoParameters) -> Flow:
    """Return the flow: group-normalised rewards, and REINFORCE with clipped weights."""
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        advantage.group_normalized(),
        *policy_update(p, loss.cispo(low=p.clip_low, high=p.clip_high)),
    ]
    return Flow("cispo", stages)

"""GSPO, arXiv 2507.18071: GRPO with a ratio and clipping per response."""

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, actor, advantage, loss
from braidrl.flow.recipes.parts import PolicyParameters, policy_update, rewarded


class GspoParameters(PolicyParameters):
    clip_low: float = Field(3e-4, ge=0, le=1)
    """ε_low: a response with a length-normalised ratio below 1 − ε_low is clipped."""
    clip_high: float = Field(4e-4, ge=0)
    """ε_high: a response with a length-normalised ratio above 1 + ε_high is clipped."""
    aggregate: str | dict[str, Any] = "seq-mean-token-mean"
    """Aggregation of token losses; the loss supports only this one."""


def gspo(p: GspoParameters) -> Flow:
    """Return the flow: group-normalised rewards and a sequence-level ratio."""
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        advantage.group_normalized(),
        *policy_update(p, loss.gspo(low=p.clip_low, high=p.clip_high)),
    ]
    return Flow("gspo", stages)

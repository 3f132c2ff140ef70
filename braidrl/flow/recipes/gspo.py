"""GSPO, arXiv 2507.18071: GRPO whose ratio and clipping belong to the whole response."""

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, actor, advantage, loss
from braidrl.flow.recipes.parameters import PolicyParameters
from braidrl.flow.recipes.parts import policy_update, rewarded


class GspoParameters(PolicyParameters):
    """Of GSPO."""

    clip_low: float = Field(3e-4, ge=0, le=1)
    """ε_low: a response whose ratio per token is below 1 − ε_low is clipped."""
    clip_high: float = Field(4e-4, ge=0)
    """ε_high: a response whose ratio per token is above 1 + ε_high is clipped."""
    aggregate: str | dict[str, Any] = "seq-mean-token-mean"
    """How the losses of tokens become one number; the loss is defined for this one alone."""


def gspo(p: GspoParameters) -> Flow:
    """Group-normalised rewards and a sequence-level ratio."""
    return Flow(
        "gspo",
        [
            actor.generate(),
            *rewarded(p.reward),
            advantage.group_normalized(),
            policy_update(p, loss.gspo(low=p.clip_low, high=p.clip_high)),
        ],
    )

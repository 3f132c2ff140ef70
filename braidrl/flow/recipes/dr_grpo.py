"""Dr. GRPO, arXiv 2503.20783: GRPO without its two biases, the divisions by length and by standard deviation."""

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, actor, advantage
from braidrl.flow.recipes.parts import ClippedParameters, policy_update, rewarded, surrogate


class DrGrpoParameters(ClippedParameters):
    max_response_tokens: int = Field(ge=1)
    """Constant that divides the sum over a response, in place of its length."""
    aggregate: str | dict[str, Any] = "token-sum-norm"
    """Aggregation of token losses; token-sum-norm divides by `max_response_tokens`."""


def dr_grpo(p: DrGrpoParameters) -> Flow:
    """Return the flow: centred rewards, and sums over tokens divided by a constant."""
    constant = {"name": "token-sum-norm", "max_tokens": p.max_response_tokens}
    aggregate = constant if p.aggregate == "token-sum-norm" else p.aggregate
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        advantage.group_centered(),
        *policy_update(p, surrogate(p), aggregate=aggregate),
    ]
    return Flow("dr_grpo", stages)

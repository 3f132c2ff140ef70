"""A reward model from preferences, as in InstructGPT, arXiv 2203.02155, equation 1: Bradley-Terry on pairs of
responses.
"""

from pydantic import Field

from braidrl.flow import Flow, Role, data, loss
from braidrl.flow.recipes.parts import Parameters


class RewardModelParameters(Parameters):
    role: str = Field("reward", pattern="^[a-z_]+$")
    """The trained role: `reward`, or `cost` on pairs in which the chosen response has the higher cost."""


def reward_model(p: RewardModelParameters) -> Flow:
    """Return the flow: the chosen response of each pair learns the higher score."""
    update = Role(p.role).update(loss=loss.bradley_terry(), aggregate="seq-mean-token-mean")
    return Flow("reward_model", [data.join_response(), update])

"""A reward model from preferences, as in InstructGPT, arXiv 2203.02155, equation 1: Bradley-Terry on pairs of responses."""

from pydantic import Field

from braidrl.flow import Flow, Role, data, loss
from braidrl.flow.recipes.parameters import Parameters


class RewardModelParameters(Parameters):
    """Of a reward model."""

    role: str = Field("reward", pattern="^[a-z_]+$")
    """The model that is trained: `reward`, or `cost` on pairs whose chosen response is the costlier one."""


def reward_model(p: RewardModelParameters) -> Flow:
    """The chosen response of each pair is to have the higher score."""
    update = Role(p.role).update(loss=loss.bradley_terry(), aggregate="seq-mean-token-mean")
    return Flow("reward_model", [data.join_response(), update])

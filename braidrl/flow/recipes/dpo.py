"""DPO, arXiv 2305.18290: preferences learned by the policy itself, without a reward model and without sampling."""

from pydantic import Field

from braidrl.flow import Flow, actor, data, loss, reference
from braidrl.flow.recipes.parameters import Parameters


class DpoParameters(Parameters):
    """Of DPO."""

    beta: float = Field(0.1, gt=0)
    """β: how strongly the policy is held near the reference."""


def dpo(p: DpoParameters) -> Flow:
    """Pairs of given responses, each compared with the reference."""
    update = actor.update(loss=loss.dpo(beta=p.beta), aggregate="seq-mean-token-mean")
    return Flow("dpo", [data.join_response(), reference.log_probs(), update])

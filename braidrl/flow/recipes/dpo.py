"""DPO, arXiv 2305.18290: the policy learns from preferences directly, without a reward model and without sampling."""

from pydantic import Field

from braidrl.flow import Flow, actor, data, loss, reference
from braidrl.flow.recipes.parts import Parameters


class DpoParameters(Parameters):
    beta: float = Field(0.1, gt=0)
    """β: a larger value keeps the policy nearer to the reference."""


def dpo(p: DpoParameters) -> Flow:
    """Return the flow: pairs of responses from the data, each compared with the reference."""
    update = actor.update(loss=loss.dpo(beta=p.beta), aggregate="seq-mean-token-mean")
    return Flow("dpo", [data.join_response(), reference.log_probs(), update])

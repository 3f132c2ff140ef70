"""RLOO, arXiv 2402.14740: REINFORCE on whole responses; the baseline is the mean reward of the prompt's other
samples.
"""

from typing import Any

from braidrl.flow import Flow, actor, advantage, loss, shape
from braidrl.flow.recipes.parts import KlParameters, PolicyParameters, policy_update, reference_model, rewarded


class ResponseParameters(PolicyParameters, KlParameters):
    aggregate: str | dict[str, Any] = "seq-mean-token-sum"
    """Aggregation of token losses; by default the mean over rows of row sums, because a response is one action."""


def rloo(p: ResponseParameters) -> Flow:
    """Return the flow: the response's KL divergence is subtracted from its reward, then the leave-one-out baseline."""
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        *reference_model(p),
        *([shape.row_kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []),
        advantage.leave_one_out(),
        *policy_update(p, loss.reinforce()),
    ]
    return Flow("rloo", stages)

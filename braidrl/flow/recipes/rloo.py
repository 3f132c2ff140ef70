"""RLOO, arXiv 2402.14740: REINFORCE on whole responses, with the mean reward of the prompt's other samples as baseline."""

from typing import Any

from braidrl.flow import Flow, actor, advantage, loss, shape
from braidrl.flow.recipes.parameters import KlParameters, PolicyParameters
from braidrl.flow.recipes.parts import policy_update, reference_model, rewarded


class RlooParameters(PolicyParameters, KlParameters):
    """Of RLOO."""

    aggregate: str | dict[str, Any] = "seq-mean-token-sum"
    """How the losses of tokens become one number; the paper's is the mean over rows of row sums: a response is one action."""


def rloo(p: RlooParameters) -> Flow:
    """The KL divergence of the response is taken from its reward before the baseline is."""
    return Flow(
        "rloo",
        [
            actor.generate(),
            *rewarded(p.reward),
            *reference_model(p),
            *([shape.row_kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []),
            advantage.leave_one_out(),
            policy_update(p, loss.reinforce()),
        ],
    )

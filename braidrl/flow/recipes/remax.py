"""ReMax, arXiv 2310.10505: the baseline of a response is the reward of its prompt's greedy response, so that no critic is needed."""

from typing import Any

from braidrl.flow import Flow, actor, advantage, loss, shape
from braidrl.flow.recipes.parts import KlParameters, PolicyParameters, policy_update, reference_model, rewarded


class RemaxParameters(PolicyParameters, KlParameters):
    aggregate: str | dict[str, Any] = "seq-mean-token-sum"
    """Aggregation of token losses; the paper uses the mean over rows of row sums."""


def remax(p: RemaxParameters) -> Flow:
    """Return the flow: PPO without a critic, and with one greedy generation per prompt as baseline."""
    stages = [
        actor.generate(),
        actor.generate(into="greedy", greedy=True),
        *rewarded(p.reward),
        *rewarded(p.reward, of="greedy"),
        advantage.remax(),
        *reference_model(p),
        *([shape.advantage_kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []),
        policy_update(p, loss.reinforce()),
    ]
    return Flow("remax", stages)

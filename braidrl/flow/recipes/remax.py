"""ReMax, arXiv 2310.10505: the baseline of a response is the reward of its prompt's greedy response, so that no critic
is needed.
"""

from braidrl.flow import Flow, actor, advantage, loss, shape
from braidrl.flow.recipes.parts import policy_update, reference_model, rewarded
from braidrl.flow.recipes.rloo import ResponseParameters


def remax(p: ResponseParameters) -> Flow:
    """Return the flow: PPO without a critic, and with one greedy generation per prompt as baseline."""
    stages = [
        actor.generate(),
        actor.generate(into="greedy", greedy=True),
        *rewarded(p.reward),
        *rewarded(p.reward, of="greedy"),
        advantage.remax(),
        *reference_model(p),
        *([shape.advantage_kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator)] if p.kl_coef > 0 else []),
        *policy_update(p, loss.reinforce()),
    ]
    return Flow("remax", stages)

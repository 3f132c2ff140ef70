"""MaxRL, arXiv 2602.02710: centred rewards divided by the group's success rate, so that hard prompts weigh more."""

from braidrl.flow import Flow, actor, advantage
from braidrl.flow.recipes.parts import ClippedParameters, policy_update, rewarded, surrogate


def maxrl(p: ClippedParameters) -> Flow:
    """Return the flow: success or failure of verified responses. A reward without `verify` is refused."""
    return Flow("maxrl", [actor.generate(), *rewarded(p.reward), advantage.maxrl(), *policy_update(p, surrogate(p))])

"""Supervised fine-tuning on responses of the data."""

from braidrl.flow import Flow, actor, data, loss
from braidrl.flow.recipes.parts import ActorParameters


def sft(p: ActorParameters) -> Flow:
    """Return the flow: maximum likelihood of the data's responses."""
    return Flow("sft", [data.join_response(), actor.update(loss=loss.sft(), aggregate=p.aggregate)])

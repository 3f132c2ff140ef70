"""Supervised fine-tuning on given responses."""

from typing import Any

from braidrl.flow import Flow, actor, data, loss
from braidrl.flow.recipes.parameters import Parameters


class SftParameters(Parameters):
    """Of supervised fine-tuning."""

    aggregate: str | dict[str, Any] = "token-mean"
    """How the losses of tokens become one number."""


def sft(p: SftParameters) -> Flow:
    """The likelihood of the data's responses given their prompts."""
    return Flow("sft", [data.join_response(), actor.update(loss=loss.sft(), aggregate=p.aggregate)])

"""Supervised fine-tuning on given responses."""

from typing import Any

from braidrl.flow import Flow, actor, data, loss
from braidrl.flow.recipes.parts import Parameters


class SftParameters(Parameters):
    aggregate: str | dict[str, Any] = "token-mean"
    """Aggregation of token losses."""


def sft(p: SftParameters) -> Flow:
    """Return the flow: maximum likelihood of given responses."""
    return Flow("sft", [data.join_response(), actor.update(loss=loss.sft(), aggregate=p.aggregate)])

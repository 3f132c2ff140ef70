"""On-policy distillation, arXiv 2306.13649: the student learns from what the teacher thinks of the student's own responses."""

from typing import Any

from braidrl.flow import Flow, actor, loss, reference
from braidrl.flow.recipes.parameters import Parameters


class DistillationParameters(Parameters):
    """Of on-policy distillation."""

    aggregate: str | dict[str, Any] = "token-mean"
    """How the losses of tokens become one number."""


def distillation(p: DistillationParameters) -> Flow:
    """The reverse KL divergence from the teacher, which is `roles.reference.model`, on sampled tokens."""
    return Flow(
        "distillation",
        [actor.generate(), reference.log_probs(), actor.update(loss=loss.distillation(), aggregate=p.aggregate)],
    )

"""On-policy distillation, arXiv 2306.13649: the student learns from the teacher's log-probs on the student's own
responses.
"""

from braidrl.flow import Flow, actor, loss, reference
from braidrl.flow.recipes.parts import ActorParameters


def distillation(p: ActorParameters) -> Flow:
    """Return the flow: the reverse KL divergence from the teacher, `roles.reference.model`, on sampled tokens."""
    return Flow(
        "distillation",
        [actor.generate(), reference.log_probs(), actor.update(loss=loss.distillation(), aggregate=p.aggregate)],
    )

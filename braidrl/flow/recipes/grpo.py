"""GRPO, arXiv 2402.03300: the advantage of a response is its reward relative to the others of its prompt."""

from typing import Any

from pydantic import Field

from braidrl.flow import Flow, actor, advantage
from braidrl.flow.recipes.parts import (
    ClippedParameters,
    KlParameters,
    policy_update,
    reference_model,
    rewarded,
    surrogate,
)


class GrpoParameters(ClippedParameters, KlParameters):
    aggregate: str | dict[str, Any] = "seq-mean-token-mean"
    """Aggregation of token losses; the paper uses the mean over rows of row means."""
    kl_coef: float = Field(0.04, ge=0)
    """β: weight of the KL term in the loss; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """Estimator of the KL divergence from the reference."""
    normalise: bool = True
    """Divide the advantages by the standard deviation of their group."""


def grpo(p: GrpoParameters) -> Flow:
    """Return the flow: groups of rewarded responses, and a KL term in the loss."""
    kl = {"name": p.kl_estimator, "coef": p.kl_coef} if p.kl_coef > 0 else None
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        *reference_model(p),
        advantage.group_normalized() if p.normalise else advantage.group_centered(),
        *policy_update(p, surrogate(p), kl=kl),
    ]
    return Flow("grpo", stages)

"""Stages that several recipes have in common."""

from collections.abc import Mapping
from typing import Any

from braidrl.errors import UserError
from braidrl.flow.families import loss, select
from braidrl.flow.recipes.parameters import ClippedParameters, KlParameters, PolicyParameters
from braidrl.flow.roles import Role, actor, reference, reward
from braidrl.flow.stage import Stage

OF_THE_LOSS = ("clip_low", "clip_high", "dual_clip")
"""Parameters of a recipe's own loss."""


def rewarded(
    sources: str | Mapping[str, float],
    of: str | None = None,
    correct_score: float | None = None,
    wrong_score: float | None = None,
) -> list[Stage]:
    """Return a stage for each source of rewards. Each stage adds its weighted score to `reward`, and writes its own column.

    Raises UserError for no source and for an invalid role name.
    """
    weights = {sources: 1.0} if isinstance(sources, str) else dict(sources)
    if not weights:
        raise UserError("reward names no source; write one, as in `reward: verify`")
    stages = []
    for name, weight in weights.items():
        if not name.isidentifier():
            raise UserError(
                f"reward: {name!r} is no source; write verify, score, or the name of a role with a reward model"
            )
        given = None if weight == 1.0 and name in ("verify", "score") else weight
        if name == "verify":
            stages.append(reward.verify(correct_score=correct_score, wrong_score=wrong_score, weight=given, of=of))
        else:
            stages.append((reward if name == "score" else Role(name)).score(weight=given, of=of))
    return stages


def informative(sources: str | Mapping[str, float]) -> Stage:
    """Return a stage that drops groups without a signal: all right or all wrong, or without `verify` equal rewards."""
    return select.informative_groups() if "verify" in sources else select.informative_rewards()


def surrogate(p: ClippedParameters) -> dict[str, Any]:
    """Return the clipped surrogate at the recipe's clip range."""
    return loss.clip(low=p.clip_low, high=p.clip_high, dual=p.dual_clip)


def policy_update(p: PolicyParameters, loss: Mapping[str, Any], **more: Any) -> Stage:
    """Return the actor's update with a loss, unless the parameters name another; `more` overrides the parameters.

    Raises UserError if the parameters also set the recipe's own loss.
    """
    if p.loss is not None:
        if own := p.model_fields_set & set(OF_THE_LOSS):
            name = min(own)
            raise UserError(
                f"algorithm.{name} is a setting of the recipe's own loss, and algorithm.loss names another; remove one, or write the "
                "settings of the other as in algorithm.loss={name: clip, high: 0.3}"
            )
        loss = {"name": p.loss} if isinstance(p.loss, str) else p.loss
    given = {
        "aggregate": p.aggregate, "old": p.old, "entropy_coef": p.entropy_coef or None, "correction": p.correction,
    }  # fmt: skip
    return actor.update(loss=loss, **{**given, **more})


def kl_term(p: KlParameters) -> dict[str, Any] | None:
    """Return the KL term in the loss, or None if its weight is 0."""
    return {"name": p.kl_estimator, "coef": p.kl_coef} if p.kl_coef > 0 else None


def reference_model(p: KlParameters) -> list[Stage]:
    """Return the stage of the reference's log-probs; none if the KL weight is 0."""
    return [reference.log_probs()] if p.kl_coef > 0 else []

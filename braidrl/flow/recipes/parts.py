"""Parameters and stages that several recipes have in common."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from braidrl.algorithms.registry import losses
from braidrl.errors import UserError
from braidrl.flow.families import loss, shape
from braidrl.flow.roles import Role, actor, reference, reward
from braidrl.flow.stage import Stage


class Parameters(BaseModel):
    """Parameters of a recipe, checked and immutable; `max_response_tokens` and `samples_per_prompt` are by default
    those of the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ActorParameters(Parameters):
    """Parameters of every recipe that trains a policy per token."""

    aggregate: str | dict[str, Any] = "token-mean"
    """Aggregation of token losses: a name, or a name with settings as in `{name: token-sum-norm, max_tokens: 512}`."""


class CovarianceParameters(Parameters):
    """The tokens that the losses `clip_cov` and `kl_cov` restrain, see `shape.highest_covariance`."""

    fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the batch's action tokens."""
    low: float | None = None
    """Only tokens with a larger covariance are chosen."""
    high: float | None = None
    """Only tokens with a smaller covariance are chosen."""


class PolicyParameters(ActorParameters):
    """Parameters of every recipe that trains a policy on its own responses."""

    reward: str | dict[str, float] = "verify"
    """Source of rewards: `verify` (rules), `score` (the reward model), another role with a reward model, or several
    with weights, as in `{verify: 1.0, score: 0.5}`.
    """
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    loss: str | dict[str, Any] | None = None
    """The policy's loss in place of the recipe's: a name from `braid list losses`, `file.py:function`, or a name with
    settings as in `{name: cispo, high: 0.3}`.
    """
    covariance: CovarianceParameters | None = None
    """The tokens that the losses `clip_cov` and `kl_cov` restrain, as in `{fraction: 2.0e-4, low: 1.0, high: 5.0}`."""
    old: Literal["recompute", "rollout", "self"] | None = None
    """Source of the log-probs before the update; by default the runtime takes the cheapest exact one."""
    correction: dict[str, Any] | None = None
    """Importance weights that correct for the engine's different numerics, as in `{name: truncated, cap: 2.0}`."""
    replay: Literal["none", "inference", "training"] | None = None
    """The experts of a mixture in the update: `inference` takes those that the engine chose for each token, in
    recomputed log-probs too; `training` those of the recomputed log-probs, for batches of several updates.
    """


class ClippedParameters(PolicyParameters):
    """Parameters of every recipe with a clipped ratio."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """ε_low: ratios below 1 − ε_low are clipped."""
    clip_high: float = Field(0.2, ge=0)
    """ε_high: ratios above 1 + ε_high are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """c of dual clipping, which bounds the loss for negative advantages; null disables it."""


class KlParameters(Parameters):
    """Parameters of recipes with a KL penalty."""

    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL penalty; 0 needs no reference model."""
    kl_estimator: str = "k1"
    """Estimator of the KL divergence from the reference."""


OF_THE_LOSS = ("clip_low", "clip_high", "dual_clip")
"""Parameters of a recipe's own loss."""


def rewarded(
    sources: str | Mapping[str, float],
    of: str | None = None,
    correct_score: float | None = None,
    wrong_score: float | None = None,
) -> list[Stage]:
    """Return a stage for each source of rewards, which adds its weighted score to `reward`.

    Raises UserError for an invalid source.
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
        weight_set = None if weight == 1.0 and name in ("verify", "score") else weight
        if name == "verify":
            stages.append(reward.verify(correct_score=correct_score, wrong_score=wrong_score, weight=weight_set, of=of))
        else:
            stages.append((reward if name == "score" else Role(name)).score(weight=weight_set, of=of))
    return stages


def surrogate(p: ClippedParameters) -> dict[str, Any]:
    return loss.clip(low=p.clip_low, high=p.clip_high, dual=p.dual_clip)


def policy_update(p: PolicyParameters, loss: Mapping[str, Any], **more: Any) -> list[Stage]:
    """Return the actor's update with this loss or the parameters' own, behind the stages that find the tokens it
    restrains; `more` overrides the update's parameters. Raises UserError if both losses are set.
    """
    if p.loss is not None:
        if unused := p.model_fields_set & set(OF_THE_LOSS):
            name = min(unused)
            raise UserError(
                f"algorithm.{name} is a setting of the recipe's own loss, and algorithm.loss names another; remove "
                "one, or write the settings of the other as in algorithm.loss={name: clip, high: 0.3}"
            )
        loss = {"name": p.loss} if isinstance(p.loss, str) else p.loss
    settings = {
        "aggregate": p.aggregate,
        "old": p.old or ("recompute" if p.replay == "training" else None),
        "entropy_coef": p.entropy_coef or None,
        "correction": p.correction,
        "replay": p.replay,
    }
    return [*restrained_tokens(p, loss["name"]), actor.update(loss=loss, **{**settings, **more})]


def restrained_tokens(p: PolicyParameters, loss_name: str) -> list[Stage]:
    """Return the stages that find the tokens of high covariance; none for a loss that does not read them.

    Raises UserError if the covariance is set for such a loss.
    """
    if loss_name in losses and "high_covariance" in losses[loss_name].reads:
        chosen = p.covariance or CovarianceParameters()
        return [shape.covariance(), shape.highest_covariance(**chosen.model_dump())]
    if p.covariance is not None:
        raise UserError("algorithm.covariance is for the losses clip_cov and kl_cov; remove it, or set algorithm.loss")
    return []


def reference_model(p: KlParameters) -> list[Stage]:
    """Return the stage of the reference's log-probs; none if the KL weight is 0."""
    return [reference.log_probs()] if p.kl_coef > 0 else []

"""Common parameters of recipes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Parameters(BaseModel):
    """Parameters of a recipe: checked and immutable; unknown keys are refused.

    Unset fields named `max_response_tokens` and `samples_per_prompt` take the value in the run's configuration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicyParameters(Parameters):
    """Parameters of every recipe that trains a policy on its own responses."""

    reward: str | dict[str, float] = "verify"
    """Source of rewards: `verify` (rules), `score` (the reward model), another role with a reward model, or several with weights, as in
    `{verify: 1.0, score: 0.5}`."""
    aggregate: str | dict[str, Any] = "token-mean"
    """Aggregation of token losses: a name, or a name with settings as in `{name: token-sum-norm, max_tokens: 512}`."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    loss: str | dict[str, Any] | None = None
    """The policy's loss in place of the recipe's: a name from `braid list losses`, `file.py:function`, or a name with settings as in
    `{name: cispo, high: 0.3}`."""
    old: Literal["recompute", "rollout", "self"] | None = None
    """Source of the log-probs before the update; by default the runtime takes the cheapest exact one."""
    correction: dict[str, Any] | None = None
    """Importance weights that correct for the engine's different numerics, as in `{name: truncated, cap: 2.0}`."""


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

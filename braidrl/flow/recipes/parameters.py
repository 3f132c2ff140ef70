"""What the parameters of recipes have in common."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Parameters(BaseModel):
    """Parameters of a recipe: checked, immutable, and no key that does not exist.

    Fields called `max_response_tokens` and `samples_per_prompt` come from the run's configuration where they are not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicyParameters(Parameters):
    """Of every recipe that improves a policy on its own responses."""

    reward: str | dict[str, float] = "verify"
    """Who rewards: `verify` (rules), `score` (the reward model), another role with a reward model, or several with weights, as in
    `{verify: 1.0, score: 0.5}`."""
    aggregate: str | dict[str, Any] = "token-mean"
    """How the losses of tokens become one number: a name, or one with settings as in `{name: token-sum-norm, max_tokens: 512}`."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    loss: str | dict[str, Any] | None = None
    """The policy's loss in place of the recipe's: a name of `braid list losses`, `file.py:function`, or one with settings as in
    `{name: cispo, high: 0.3}`."""
    old: Literal["recompute", "rollout", "self"] | None = None
    """Where the log-probs before the update come from; by default the runtime takes the cheapest that is exact."""
    correction: dict[str, Any] | None = None
    """Weights for what the engine's numerics differ from the trainer's, as in `{name: truncated, cap: 2.0}`."""


class ClippedParameters(PolicyParameters):
    """Of every recipe that improves a policy by a clipped ratio."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """ε_low: ratios below 1 − ε_low are clipped."""
    clip_high: float = Field(0.2, ge=0)
    """ε_high: ratios above 1 + ε_high are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """c of dual clipping, which bounds the loss where the advantage is negative; none does not."""


class KlParameters(Parameters):
    """Of recipes that hold the policy near a reference."""

    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL penalty; 0 needs no reference model."""
    kl_estimator: str = "k1"
    """How the KL divergence from the reference is estimated."""

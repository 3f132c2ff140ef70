"""DAPO, arXiv 2503.14476: GRPO with a higher upper clip, dynamic sampling, token-level loss and overlong reward
shaping, without KL.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from braidrl.flow import Flow, actor, advantage, select, shape
from braidrl.flow.recipes.parts import ClippedParameters, policy_update, rewarded, surrogate

# In the paper the punishment grows over the last 4,096 of 20,480 tokens.
CACHE_SHARE = 5


class DapoParameters(ClippedParameters):
    clip_high: float = Field(0.28, ge=0)
    """ε_high: more room than ε_low for unlikely tokens to become likelier."""
    correct_score: float = 1.0
    """Score of a right answer."""
    wrong_score: float = -1.0
    """Score of a wrong answer."""
    dynamic_sampling: bool | Literal["rewards"] = True
    """Drop groups that are all right or all wrong, and continue sampling until the batch is full. Right is a score of
    at least `correct_score`. With `rewards`, for graded scores, drop groups with equal rewards.
    """
    max_response_tokens: int = Field(ge=1)
    """Maximum length of a response; at this length the punishment is 1."""
    overlong_cache: int | None = Field(None, ge=0)
    """Number of tokens before the limit over which the punishment grows; by default a fifth of the limit, 0 disables
    it.
    """
    overlong_filter: bool = False
    """Exclude truncated responses from the loss."""

    @model_validator(mode="after")
    def _cache_fits(self) -> Self:
        if self.cache > self.max_response_tokens:
            raise ValueError(f"overlong_cache ({self.cache}) is above max_response_tokens ({self.max_response_tokens})")
        return self

    @property
    def cache(self) -> int:
        return self.max_response_tokens // CACHE_SHARE if self.overlong_cache is None else self.overlong_cache


def dapo(p: DapoParameters) -> Flow:
    """Return the flow: rule rewards of ±1, dynamic sampling, and a mean over all tokens of the batch."""
    # Without a rule for right answers, a group has no gradient if its rewards are equal.
    verified = p.dynamic_sampling != "rewards" and "verify" in p.reward
    informative = select.informative_groups() if verified else select.informative_rewards()
    penalty = shape.overlong_penalty(max_response_tokens=p.max_response_tokens, cache=p.cache) if p.cache else None
    stages = [
        actor.generate(),
        *rewarded(p.reward, correct_score=p.correct_score, wrong_score=p.wrong_score),
        informative if p.dynamic_sampling else None,
        penalty,
        shape.overlong_filter() if p.overlong_filter else None,
        advantage.group_normalized(),
        *policy_update(p, surrogate(p)),
    ]
    return Flow("dapo", [stage for stage in stages if stage is not None])

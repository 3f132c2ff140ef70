"""VAPO, arXiv 2504.05118: PPO for long reasoning, with critic warm-up and a λ that depends on the length."""

from pydantic import Field

from braidrl.flow import Flow, advantage
from braidrl.flow.recipes.ppo import PpoParameters, ppo_stages


class VapoParameters(PpoParameters):
    reward: str | dict[str, float] = "verify"
    """Source of rewards: `verify` (rules), `score` (the reward model), another role with a reward model, or several
    with weights.
    """
    kl_coef: float = Field(0.0, ge=0)
    """Weight of a KL penalty in the reward; the paper has none."""
    clip_high: float = Field(0.28, ge=0)
    """ε_high: more room than ε_low for unlikely tokens to become likelier."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of the critic's returns; 1 gives Monte-Carlo returns."""
    alpha: float = Field(0.05, gt=0)
    """The actor's λ is 1 − 1/(alpha · length)."""
    critic_warmup: int = Field(50, ge=0)
    """Number of first iterations that train only the critic, with a fixed policy."""
    positive_coef: float = Field(0.1, ge=0)
    """μ: weight of the likelihood of right answers in the actor's loss; 0 for rewards that are not verified."""


def vapo(p: VapoParameters) -> Flow:
    """Return the flow: decoupled, length-adaptive GAE, Clip-Higher, token-level loss, imitation of right answers."""
    estimator = advantage.decoupled_gae(gamma=p.gamma, lam_critic=p.lam, alpha=p.alpha)
    return Flow("vapo", ppo_stages(p, estimator, positive_coef=p.positive_coef))

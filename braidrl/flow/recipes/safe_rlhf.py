"""Safe-RLHF, arXiv 2310.12773: PPO-Lagrangian. It maximises the reward while the mean cost stays below a limit."""

from pydantic import Field

from braidrl.flow import Flow, When, actor, advantage, cost, cost_critic, critic, loss, shape
from braidrl.flow.recipes.parts import policy_update, reference_model, rewarded, surrogate
from braidrl.flow.recipes.ppo import CriticParameters
from braidrl.flow.stages import make_stage


class SafeRlhfParameters(CriticParameters):
    cost: str = "score"
    """Source of costs: `score` (the cost model), or your own function that writes `cost`, as in
    `limits.py:length_cost`.
    """
    cost_limit: float = 0.0
    """d: the highest allowed mean cost."""
    multiplier: float = Field(1.0, ge=0)
    """Initial value of λ."""
    multiplier_learning_rate: float = Field(0.1, ge=0)
    """Change of λ per iteration for each unit of mean cost above the limit."""
    ptx_coef: float = Field(0.0, ge=0)
    """Weight of the likelihood of pre-training text (`data.ptx`) in the actor's loss; 0 needs none."""


def safe_rlhf(p: SafeRlhfParameters) -> Flow:
    """Return the flow: PPO with a second critic for costs; a multiplier, adapted to the mean cost, mixes the
    advantages.
    """
    penalty = shape.safe_rlhf_kl_penalty(coef=p.kl_coef, estimator=p.kl_estimator) if p.kl_coef > 0 else None
    stages = [
        actor.generate(),
        *rewarded(p.reward),
        cost.score() if p.cost == "score" else make_stage(p.cost),
        *reference_model(p),
        critic.values(),
        cost_critic.values(),
        *([penalty] if penalty else []),
        advantage.gae(gamma=p.gamma, lam=p.lam),
        advantage.cost_gae(gamma=p.gamma, lam=p.lam),
        advantage.safe_rlhf(threshold=p.cost_limit, learning_rate=p.multiplier_learning_rate, multiplier=p.multiplier),
        *([advantage.whiten()] if p.whiten else []),
        critic.update(loss=loss.value(clip=p.value_clip)),
        cost_critic.update(loss=loss.value(clip=p.value_clip)),
        *policy_update(p, surrogate(p), ptx_coef=p.ptx_coef, when=When(start=p.critic_warmup + 1)),
    ]
    return Flow("safe_rlhf", stages)

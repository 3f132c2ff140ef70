"""An algorithm as a list of stages. Everything else (edges, order, what moves) follows from the columns they name."""

from braidrl.flow.families import advantage, correction, data, kl, loss, select, shape
from braidrl.flow.flow import Flow
from braidrl.flow.roles import Role, actor, cost, cost_critic, critic, reference, reward
from braidrl.flow.stage import Kind, Scope, Stage, When

__all__ = [
    "Flow",
    "Kind",
    "Role",
    "Scope",
    "Stage",
    "When",
    "actor",
    "advantage",
    "correction",
    "cost",
    "cost_critic",
    "critic",
    "data",
    "kl",
    "loss",
    "reference",
    "reward",
    "select",
    "shape",
]

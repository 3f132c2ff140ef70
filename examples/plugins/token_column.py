"""A column per token, from the engine to the loss: the log-probs of the two likeliest tokens at each draw, and a policy
loss in which tokens count only where the policy was in doubt.

80% of tokens hardly have an alternative; training on the others alone is as good or better (arXiv 2506.01939).
"""

from __future__ import annotations

import torch
from torch import Tensor

from braidrl.algorithms.registry import losses
from braidrl.data.token_columns import token_column
from braidrl.flow import Flow, actor, advantage, reward


@token_column(dtype=torch.float32, shape=(2,))
def top_two(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probs of the two likeliest tokens, (B, 2), of logits (B, V)."""
    return logits.log_softmax(-1).topk(2, -1).values


@losses.register()
def in_doubt(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, top_two: Tensor, *, most: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −(π/π_old)·A (A,) for tokens whose two likeliest alternatives are within `most` nats, 0 for others."""
    doubted = (top_two[:, 0] - top_two[:, 1] <= most).to(log_probs.dtype)
    return -(log_probs - old_log_probs).exp() * advantages * doubted, {"doubted_fraction": doubted}


def flow() -> Flow:
    """Return GRPO with this loss: `flow: examples/plugins/token_column.py:flow`."""
    update = actor.update(loss={"name": "in_doubt"}, aggregate="token-mean")
    return Flow("in_doubt", [actor.generate(), reward.verify(), advantage.group_normalized(), update])

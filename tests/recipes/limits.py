"""A reward and a cost that pull against each other: the more symbols the better, and each of them costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from braidrl.algorithms.registry import shapes


def sevens(response: str, answer: Any) -> float:
    """4·√(how often the response says 7): each further one brings less."""
    return 4.0 * response.count("7") ** 0.5


@shapes.register(writes=["cost"])
def length_cost(action_tokens: Tensor) -> Tensor:
    """Tokens of the response, (B,)."""
    return action_tokens.float()

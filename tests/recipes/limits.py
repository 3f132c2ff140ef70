"""A reward and a cost in conflict: more symbols score higher, and each of them costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from braidrl.algorithms.registry import shapes


def sevens(response: str, answer: Any) -> float:
    """Return 4·√(number of sevens in the response), so that each further seven adds less."""
    return 4.0 * response.count("7") ** 0.5


@shapes.register(writes=["cost"])
def length_cost(action_tokens: Tensor) -> Tensor:
    """Return the tokens of the response, (B,)."""
    return action_tokens.float()

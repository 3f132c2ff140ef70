"""What an environment answers to a turn."""

from __future__ import annotations

import math
from dataclasses import dataclass

from braidrl.rollout.episodes.turns import Context


@dataclass(frozen=True)
class Observation:
    """What follows from one turn of the model."""

    said: Context = ""
    """Text, or messages such as tool results, to be appended; with `restart` the whole next context."""
    reward: float = 0.0
    """Of this turn; a row's score is the sum over its turns."""
    done: bool = False
    correct: bool | None = None
    """Whether the task was solved; by default whether the score is that of a right answer."""
    restart: bool = False
    """`said` takes the place of everything before. Where it extends that token by token it is appended, else it opens a new sequence."""

    def __post_init__(self) -> None:
        """Raises ValueError for a reward that is not a finite number, and TypeError for what cannot be said."""
        check_context(self.said)
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward of a turn must be a finite number, got {self.reward}")


def check_context(said: object) -> None:
    """Raises TypeError for what is neither text nor messages."""
    if isinstance(said, str):
        return
    if not isinstance(said, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in said):
        raise TypeError(f"an environment says text or messages {{role, content}}, not {said!r}")

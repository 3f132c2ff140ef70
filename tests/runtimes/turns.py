"""An environment for the tests of runtimes: contexts that are continued and replaced, and one that fails now and then."""

from __future__ import annotations

from typing import Any

from braidrl.agents.turns import Observation

PLAYED = f"{__file__}:Sums"


class Sums:
    """Three sums one after the other, the last in a context of its own; half a point for each first digit that is even."""

    def __init__(self, fails: int = 0) -> None:
        """Trajectories whose group's number is a multiple of `fails` raise in their second turn, if they are sample 1."""
        self.fails, self.turn = fails, 0

    async def reset(self, example: dict[str, Any]) -> str | None:
        self.example = example
        return None if example["group"] % 2 else f"{example['seed'] % 10}+{example['group'] % 10}="

    async def step(self, text: str) -> Observation:
        self.turn += 1
        if self.fails and self.turn == 2 and self.example["sample"] == 1 and self.example["group"] % self.fails == 0:
            raise ValueError("the sum is lost")
        reward = 0.5 * (text[:1] in set("02468"))
        if self.turn == 2:
            return Observation(f"{self.example['seed'] % 7}+1=", reward, restart=True)
        return Observation(" 4+4=", reward, done=self.turn == 3)

"""Two turns: the first opens the right door or a wrong one, and the second is luck, whatever the model says."""

from __future__ import annotations

import random
from typing import Any

from braidrl.agents.environments import Observation

LUCK = 4.0
"""The reward of a lucky second turn, four times that of a right door."""


RIGHT = "3"
"""The right door."""


class Doors:
    """The first turn names a door; the second one gets a reward by chance."""

    async def reset(self, example: dict[str, Any]) -> str:
        self.turn = 0
        self.luck = random.Random(f"{example['seed']} {example['sample']}").choice([0.0, LUCK])
        return "door"

    async def step(self, text: str) -> Observation:
        self.turn += 1
        if self.turn == 2:
            return Observation(reward=self.luck, done=True, correct=self.is_right)
        self.is_right = text.split()[:1] == [RIGHT]
        return Observation(" luck", reward=float(self.is_right))

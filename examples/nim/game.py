"""Nim: players take one to three stones in turn, and who takes the last one wins.

A model plays both sides of a row, or two models play a side each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from braidrl.agents.environments import Observation

MOST_TAKEN = 3


def best_move(stones: int) -> int:
    """Return the move that leaves a multiple of four; without one, take a single stone."""
    return stones % (MOST_TAKEN + 1) or 1


class Nim:
    """A game of a model against itself, or against the example's `opponent`: `random` or `perfect`.

    A turn's reward is 1 if it wins and −1 if it breaks the rules. An advantage with gamma −1 gives it, with the other
    sign, to the other side's turn before it.
    """

    async def reset(self, example: dict[str, Any]) -> str:
        self.stones, self.opponent = int(example["stones"]), example.get("opponent")
        self.source = random.Random(f"{example['seed']} {example['sample']}")
        return f"stones {self.stones} take"

    async def step(self, text: str) -> Observation:
        taken = text.split()[0] if text.split() else ""
        if taken not in map(str, range(1, min(MOST_TAKEN, self.stones) + 1)):
            return Observation(reward=-1.0, done=True, correct=False)
        self.stones -= int(taken)
        if not self.stones:
            return Observation(reward=1.0, done=True, correct=True)
        if self.opponent:
            most = min(MOST_TAKEN, self.stones)
            self.stones -= best_move(self.stones) if self.opponent == "perfect" else self.source.randint(1, most)
            if not self.stones:
                return Observation(reward=-1.0, done=True, correct=False)
        return Observation(f" stones {self.stones} take")


class Duel(Nim):
    """A game between `actor` and one of the roles `opponents`; what one wins, the other loses. The group chooses the
    opponent, and which of the two begins.

    Against the example's `opponent` the actor plays alone.
    """

    def __init__(self, opponents: Sequence[str] = ("rival",)) -> None:
        self.opponents = opponents

    async def reset(self, example: dict[str, Any]) -> Observation:
        stones, source = await super().reset(example), random.Random(example["seed"])
        sides = ["actor", source.choice(self.opponents)]
        self.acting, self.other = sides if self.opponent else source.sample(sides, 2)
        return Observation(stones, policy=self.acting)

    async def step(self, text: str) -> Observation:
        seen = await super().step(text)
        if self.opponent:
            return seen
        if seen.done:
            return replace(seen, rewards={self.other: -seen.reward})
        self.acting, self.other = self.other, self.acting
        return replace(seen, policy=self.acting)

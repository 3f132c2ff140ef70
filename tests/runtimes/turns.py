"""An environment for the tests of runtimes: its contexts continue or are replaced, and it sometimes fails."""

from __future__ import annotations

from typing import Any

from braidrl.agents.turns import Observation

PLAYED = f"{__file__}:Sums"


class Sums:
    """Three sums in turn, the last in a separate context; each gives half a point if its first digit is even."""

    def __init__(self, fails: int = 0) -> None:
        """Trajectories of sample 1 raise in their second turn if their group number is a multiple of `fails`."""
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


class Match:
    """Two roles in turn: the group decides which plays the actor and which begins, each reads the length of the other's
    turn, and some rows end before the second role acts. A turn earns half a point if its first digit is even, and the
    last takes it from the other role.
    """

    def __init__(self, opponents: tuple[str, ...] = ("rival",)) -> None:
        self.opponents = opponents

    async def reset(self, example: dict[str, Any]) -> Observation:
        other = self.opponents[example["group"] // 2 % len(self.opponents)]
        self.turn, sides = 0, ("actor", other)
        self.acting, self.other = sides if example["group"] % 2 == 0 else sides[::-1]
        self.last = 1 if example["group"] % 4 == 1 and example["sample"] == 0 else 4
        return Observation("" if example["group"] % 3 else "1+1=", policy=self.acting)

    async def step(self, text: str) -> Observation:
        self.turn += 1
        reward, self.acting, self.other = 0.5 * (text[:1] in set("02468")), self.other, self.acting
        if self.turn == self.last:
            return Observation(reward=reward, done=True, rewards={self.acting: -reward})
        return Observation(f"{len(text)}+{self.turn}=", reward, policy=self.acting, restart=self.turn == 3)

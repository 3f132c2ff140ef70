"""An environment of two turns with one observation between them."""

from __future__ import annotations

from typing import Any

from braidrl.agents.turns import Observation


class TwoTurns:
    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, example: dict[str, Any]) -> str:
        return "1+1="

    async def step(self, text: str) -> Observation:
        self.turns += 1
        return Observation("2+2=", 0.5, self.turns == 2)

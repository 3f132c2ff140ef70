"""Registers `hostile`, an environment of gem and a data set of reasoning-gym, in each process that has this folder on
its path.

Each trajectory draws one of the kinds of misbehaviour that the variable HOSTILE lists.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset

FLOOD = 50 << 20
KINDS = os.environ["HOSTILE"].split()


def misbehaves(kind: str) -> None:
    if kind == "sleeps":
        time.sleep(600)
    if kind == "raises":
        raise RuntimeError("x" * FLOOD)
    if kind == "exits":
        os._exit(3)
    if kind == "takes":
        bytearray(10 << 30)


class Game:
    """An environment of gem that answers once."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.kind = random.choice(KINDS)
        return "Guess the number.", {}

    def step(self, action: str) -> Any:
        misbehaves(self.kind)
        said = {"floods": "x" * FLOOD, "nothing": None}.get(self.kind, "right")
        reward = {"nan": float("nan"), "text": "much"}.get(self.kind, len(action) % 2)
        return 3 if self.kind == "shape" else (said, reward, self.kind != "floods", False, {})


@dataclass
class Config:
    seed: int = 0
    size: int = 10

    def validate(self) -> None:
        """Accept everything."""


class Questions(ProceduralDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        kind = random.choice(KINDS)
        question = {"floods": "x" * FLOOD, "nothing": None, "shape": 3}.get(kind, "Guess the number.")
        return {"question": question, "answer": "1", "metadata": {"kind": kind}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> Any:
        kind = entry["metadata"]["kind"]
        misbehaves(kind)
        return {"nan": float("nan"), "text": "much"}.get(kind, random.randrange(2))


register_dataset("hostile", Questions, Config)
# Imported after that: gem lists the data sets of reasoning-gym when it is imported.
from gem.envs.registration import register  # noqa: E402

register("hostile", Game)

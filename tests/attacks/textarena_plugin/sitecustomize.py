"""Registers `hostile`, a game of textarena, in each process that has this folder on its path and textarena.

Each trajectory draws one of the kinds of misbehaviour that the variable HOSTILE lists.
"""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec
from typing import Any

FLOOD = 50 << 20
KINDS = os.environ["HOSTILE"].split()


def register() -> None:
    import textarena as ta

    class Game(ta.Env):
        """A game of one player that answers once; the first reset, of seed 0, only shows that it can be made."""

        def reset(self, num_players: int, seed: int | None = None) -> None:
            self.kind = random.choice(KINDS)
            self.state = ta.SinglePlayerState(num_players=num_players, seed=seed)
            self.state.reset(game_state={}, player_prompt_function=lambda **_: "Guess the number.")

        def step(self, action: str) -> Any:
            if self.kind == "sleeps":
                time.sleep(600)
            if self.kind == "raises":
                raise RuntimeError("x" * FLOOD)
            if self.kind == "exits":
                os._exit(3)
            if self.kind == "takes":
                bytearray(10 << 30)
            if self.kind == "floods":
                self.state.add_observation("x" * FLOOD, ta.ObservationType.GAME_MESSAGE)
                return self.state.step()
            reward: Any = {"nan": float("nan"), "text": "much", "nothing": None}.get(self.kind, len(action) % 2)
            self.state.set_outcome(reward)
            return 3 if self.kind == "shape" else self.state.step()

    ta.register("hostile", Game)


if find_spec("textarena") is not None:
    register()

"""An OpenEnv server that asks for a number from 1 to 10: `python examples/guess_number/openenv_server.py 8000`. Needs
openenv.
"""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    said: str


class GuessNumber(Environment[Guess, Hint, State]):
    """A game of up to four guesses, worth 1 for the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._number = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._state, self._number = State(episode_id=episode_id), random.Random(seed).randint(1, 10)
        return Hint(said="Guess the number between 1 and 10.", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        found = re.search(r"[0-9]+", action.message)
        guess = int(found[0]) if found else 0
        right, last = guess == self._number, self._state.step_count >= 4
        said = "right" if right else "higher" if guess < self._number else "lower"
        return Hint(said=said, done=right or last, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(GuessNumber, Guess, Hint, env_name="guess_number", max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

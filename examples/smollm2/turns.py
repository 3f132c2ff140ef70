"""Questions of reasoning-gym that allow several answers: how often a letter occurs in a text.

user       How many times does the letter "s" appear in the text: ...? Answer with \\boxed{number} and nothing else.
assistant  \\boxed{2}
user       That is not the number. Answer with another \\boxed{number}.
assistant  \\boxed{4}
"""

from __future__ import annotations

from typing import Any

from braidrl.agents.libraries import load_gem
from braidrl.agents.turns import Context, Observation
from examples.smollm2.tasks import QUESTIONS

TRIES = 4
ASK = r"Answer with \boxed{number} and nothing else."
SHOWN = 'How many times does the letter "e" appear in the text: "the day after"?'
AGAIN = r"That is not the number. Answer with another \boxed{number}."


GYM = load_gem().make("rg:letter_counting", size=QUESTIONS, seed=0)
"""All questions, made once, in the process of each trajectory: it takes a second."""


class LetterCounting:
    """An environment worth 1 for the right number at once, and a quarter less for each earlier try."""

    async def reset(self, example: dict[str, Any]) -> Context:
        self.tries, self.question = 0, GYM.ds[example["seed"]]
        shown = {"role": "user", "content": f"{SHOWN} {ASK}"}, {"role": "assistant", "content": r"\boxed{2}"}
        return [*shown, {"role": "user", "content": f"{self.question['question']} {ASK}"}]

    async def step(self, text: str) -> Observation:
        self.tries += 1
        GYM.set_state({"idx": 0, "data": self.question})
        if GYM.step(text)[1] == 1:
            return Observation(reward=1 - (self.tries - 1) / TRIES, done=True, correct=True)
        return Observation(AGAIN, done=self.tries == TRIES, correct=False)

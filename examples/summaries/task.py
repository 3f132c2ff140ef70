"""A text that is read part by part; between parts the model keeps only its own notes.

notes none part birds sing code 7    ──▶ 7          a context each: none extends the one before, so each is a sequence
notes 7 part rain falls again        ──▶ 7          of its own, and all are one row
notes 7 question code                ──▶ 7
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from braidrl.agents.turns import Observation

FILLERS = ["birds", "sing", "rain", "falls", "again", "wind", "blows", "grass", "grows"]
CODES = [str(number) for number in range(10)]
WORDS = " ".join(["notes none part question code", *FILLERS, *CODES])
PARTS = 3
NOTES_WORTH = 0.2
"""The reward of a turn's notes: they must hold the code once it was read, and `none` before. The answer is worth 1."""


class Reader:
    """Environment of one text. The model's message at a part is its notes, and at the question its answer."""

    async def reset(self, example: dict[str, Any]) -> str:
        self.parts, self.code, self.turn = example["parts"], example["answer"], 0
        return self.context("none")

    async def step(self, text: str) -> Observation:
        self.turn += 1
        said = text.strip()
        if self.turn > len(self.parts):
            return Observation(reward=float(said == self.code), done=True, correct=said == self.code)
        seen = any(self.code in part.split() for part in self.parts[: self.turn])
        right = said == (self.code if seen else "none")
        return Observation(self.context(said), reward=NOTES_WORTH * right, restart=True)

    def context(self, notes: str) -> str:
        """Return everything that the model sees in this turn."""
        if self.turn == len(self.parts):
            return f"notes {notes} question code"
        return f"notes {notes} part {self.parts[self.turn]}"


def texts(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return texts with the code in one of their parts."""
    source = random.Random(seed)
    for _ in range(count):
        code, where = source.choice(CODES), source.randrange(PARTS)
        parts = [" ".join(source.sample(FILLERS, 3)) + (f" code {code}" if n == where else "") for n in range(PARTS)]
        yield {"prompt": "What is the code?", "answer": code, "parts": parts}


def demonstrations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return turns of a reader that errs in half of them."""
    source = random.Random(seed)
    for text in texts(count, seed):
        notes, code = "none", text["answer"]
        for part in [*text["parts"], None]:
            context = f"notes {notes} question code" if part is None else f"notes {notes} part {part}"
            right = code if part is None or code in part.split() else notes
            said = right if source.random() < 0.5 else source.choice([*CODES, "none"])
            yield {"prompt": context, "response": said, "answer": code}
            notes = right

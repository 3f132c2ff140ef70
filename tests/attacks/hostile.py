"""A verifier of which every third row attacks, as its tokens draw it.

In an undisturbed run (`BRAID_QUIET`) these rows only raise.
"""

import hashlib
import json
import os
from pathlib import Path

from braidrl.rewards.verifiers import Score

TRIES = (
    json.loads(Path(__file__).with_suffix(".json").read_text()) if Path(__file__).with_suffix(".json").exists() else []
)


def verdict(prompt: object, response: str, answer: str, metadata: dict) -> Score:
    drawn = int(hashlib.sha256(f"{prompt}{response}".encode()).hexdigest(), 16)
    if drawn % 3 or not response:
        return Score(drawn % 1000 / 1000, correct=bool(drawn % 2))
    if "BRAID_QUIET" not in os.environ:
        names: dict = {"at": None, "won": False}
        exec(TRIES[drawn // 3 % len(TRIES)], names)
    raise RuntimeError("an attack, or in its place nothing")

"""Tries as text: each is executed as a user's verifier in the sandbox and says whether it has `won`.

What it needs is in `at`.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

SCORES = {"honest": 0.0}


def tried(response: str, metadata: dict[str, Any]) -> bool:
    names: dict[str, Any] = {"at": SimpleNamespace(**metadata), "won": False}
    exec(response, names)
    return bool(names["won"])


async def tried_async(response: str, metadata: dict[str, Any]) -> bool:
    await asyncio.sleep(0)
    return tried(response, metadata)


def answers(response: str, metadata: dict[str, Any]) -> Any:
    """Return the `answer` of a text."""
    from braidrl.rewards.verifiers import Score

    names: dict[str, Any] = {"Score": Score}
    exec(response, names)
    return names["answer"]

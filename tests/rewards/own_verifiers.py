"""Verifiers as a user would write them in a file of their own, the ill-behaved ones too."""

import asyncio
import os
import subprocess
import sys
import time
from fractions import Fraction

from braidrl.rewards.verifiers import Score

in_flight = 0


def length(response: str, *, most: int = 10) -> float:
    return min(len(response), most) / most


def judged(prompt: str, response: str, answer: str, metadata: dict, source: str) -> Score:
    return Score(0.25, correct=[prompt, response, answer, metadata["level"], source] == ["p", "r", "a", 3, "s"])


def by_word(response: str, answer: str) -> bool:
    """Does to its process what the response says."""
    if response == "hang":
        time.sleep(600)
    if response == "spin":
        while True:
            pass
    if response == "raise":
        raise ValueError("no such luck")
    if response == "exit":
        sys.exit("leaving")
    if response == "die":
        os._exit(3)
    if response == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    return response == answer


def returns_text(response: str) -> str:
    return response


def returns_nan(response: str) -> float:
    return float("nan")


def counts_exactly(response: str) -> Score:
    return Score(1.0, metrics={"length": Fraction(len(response))})  # type: ignore[dict-item]


def loaded_modules(metadata: dict) -> float:
    return float(sum(name in sys.modules for name in ("torch", "transformers", "ray")))


async def remote(response: str, answer: str, *, seconds: float = 0.3, calls: str | None = None) -> bool:
    if calls is not None:
        with open(calls, "a") as file:
            file.write(f"{response}\n")
    if response == "raise":
        raise ConnectionError("judge is away")
    await asyncio.sleep(600 if response == "hang" else seconds)
    return response == answer


async def most_together(response: str) -> float:
    """Return the number of calls in progress, including this one."""
    global in_flight
    in_flight += 1
    await asyncio.sleep(0.5)
    together = in_flight
    await asyncio.sleep(0.1)
    in_flight -= 1
    return float(together)


async def blocking(response: str, answer: str) -> bool:
    await asyncio.sleep(0.1)
    if response == "block":
        time.sleep(600)
    if response == "die":
        os._exit(3)
    return response == answer


def unknown_parameter(response: str, reference: str) -> bool:
    return response == reference


def any_settings(response: str, **settings: float) -> float:
    return settings["base"]


def runs_in(response):
    return response == str(os.getpid())

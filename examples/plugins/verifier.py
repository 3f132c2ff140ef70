"""User-defined verifiers: a rule with partial credit, and a judge behind an address."""

import asyncio
import json
import re
from urllib.request import urlopen


def counts_steps(response: str, answer: str, *, at_most: int = 10) -> float:
    """Return 1 for the right last number in few steps, and less for more steps."""
    numbers = re.findall(r"-?[0-9]+", response)
    if not numbers or numbers[-1] != answer:
        return 0.0
    return min(1.0, at_most / max(1, response.count("\n")))


async def judged(prompt: str, response: str, *, url: str) -> float:
    """Return the score of a judge behind an address."""
    asked = json.dumps({"prompt": prompt, "response": response}).encode()
    reply = await asyncio.to_thread(lambda: json.load(urlopen(url, asked)))
    return float(reply["score"])

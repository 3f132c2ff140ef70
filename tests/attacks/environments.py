"""Environments, tools and agents that do what their rows' prompts say: the attacks of `verifiers.py` and some of their
own.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

from braidrl.agents.environments import ToolTurns, called
from braidrl.agents.turns import Observation
from tests.attacks.verifiers import ATTACKS, own_sockets


class Attacked:
    """Two turns; in the second one, or in `reset`, what the row's prompt says."""

    def __init__(self, **metadata: Any) -> None:
        self.metadata, self.turn, self.tools = metadata, 0, []

    async def reset(self, example: dict[str, Any]) -> str:
        self.attack = example["prompt"]
        return "play"

    def step(self, text: str) -> Observation:
        self.turn += 1
        if self.turn < 2:
            return Observation("on", reward=0.5)
        reward = attack(self.attack, self.metadata)
        return Observation("on", reward=reward, done=True)


def attack(name: str, metadata: dict[str, Any]) -> float:
    """Make an attack; score half a point for none, and one more for an attack that succeeded."""
    if name == "pid":
        return float(os.getpid())
    if name == "sleeps":
        time.sleep(metadata["seconds"])
    if name == "says a gigabyte":
        raise RuntimeError("x" * (1 << 30))
    if name == "writes answers of its own":
        for answer in (b"[" * 100_000, b'{"reward": "much", "done": true}', b'{"again": true, "failure": ["x"]}'):
            for number in own_sockets():
                os.write(number, answer + b"\n")
        os._exit(0)
    if name == "fills shared memory":
        Path("/dev/shm", metadata["mark"]).write_bytes(b"x" * 4096)
        return 0.5
    return 0.5 + bool(name in ATTACKS and ATTACKS[name](metadata))


LOOK = {
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "integer", "description": "Where."}},
        "required": ["at"],
    },
}


class Tools(ToolTurns):
    """One tool, which attacks as the row's prompt says."""

    def __init__(self, **metadata: Any) -> None:
        super().__init__([{"type": "function", "function": LOOK}])
        self.metadata = metadata

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await called(lambda at: f"found {attack(self.example['prompt'], self.metadata)}", **arguments)

    def answered(self, text: str) -> Observation:
        return Observation(reward=0.5, done=True)


def act(base_url: str, example: dict[str, Any], **metadata: Any) -> float:
    """An agent with a turn of its own before it attacks."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    asked = urllib.request.Request(
        f"{base_url}/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert answer.status == 200
    return attack(example["prompt"], metadata)

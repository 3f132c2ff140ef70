"""What ranks do in the tests of how they start and end; each is told what by its task."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from braidrl.cluster.world import World
from braidrl.errors import UserError


def words(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Every kind of meeting, with messages of different lengths."""
    gathered = [bytes(part).decode() for part in world.gather("words", b"x" * world.rank)]
    exchanged = [
        bytes(part).decode()
        for part in world.exchange("letters", [f"{world.rank}>{to}".encode() for to in range(world.size)])
    ]
    shared = world.share("a value", {"from": world.rank})
    return {"gathered": gathered, "exchanged": exchanged, "shared": shared, "task": task}


def devices(world: World, task: dict[str, Any]) -> list[str]:
    """What each rank was told of its devices before it imported torch."""
    return [bytes(seen).decode() for seen in world.gather("devices", os.environ["CUDA_VISIBLE_DEVICES"].encode())]


def device_of_a_worker(arguments: dict[str, Any]) -> str:
    """What a worker sees."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def failing(world: World, task: dict[str, Any]) -> None:
    """One rank ends as the task says, the others wait for it."""
    world.at("step 3, reward.verify")
    Path(task["folder"], f"rank-{world.rank}").write_text(str(os.getpid()))
    world.gather("everybody is there", b"")
    if world.rank == 1:
        world.rows = "(0, 7, 1)"
        match task["how"]:
            case "raise":
                raise ValueError("no such luck")
            case "user":
                raise UserError("row (0, 7, 1) is too long; write a shorter one")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(60)
            case "astray":
                world.gather("another thing", b"")
    world.at("step 3, actor.update")
    world.gather("index columns", b"")


def waiting(world: World, task: dict[str, Any]) -> None:
    """Waits in a meeting to which the last rank does not come, until it is ended."""
    Path(task["folder"], f"rank-{world.rank}").write_text(str(os.getpid()))
    if world.rank:
        time.sleep(60)
    world.gather("nothing", b"")
